//! The public surface is what `tests/surface.txt` says. `DRAGOMAN_UPDATE_SURFACE=1 cargo test --test surface` writes it anew.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use syn::{Attribute, ImplItem, Item, UseTree, Visibility};

const SURFACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/surface.txt");

#[test]
fn the_public_surface_is_frozen() {
    let now = surface();
    if std::env::var_os("DRAGOMAN_UPDATE_SURFACE").is_some() {
        fs::write(SURFACE, &now).unwrap();
    }
    let held = fs::read_to_string(SURFACE).unwrap();
    assert!(
        now == held,
        "the public surface changed; where that is meant, write {SURFACE} anew:\n{now}"
    );
}

/// Everything that a user can name: the re-exports of `lib.rs`, the public items behind them, and their impls.
fn surface() -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let library = parse(&source.join("lib.rs"));
    let mut exported = BTreeSet::new();
    let mut lines = BTreeSet::new();
    for item in &library.items {
        match item {
            Item::Use(item) if is_public(&item.vis) => {
                names_of(&item.tree, &mut exported);
                lines.insert(shown(bare(Item::Use(item.clone()))));
            }
            Item::Mod(item) if is_public(&item.vis) => {
                lines.insert(format!("pub mod {};", item.ident));
            }
            _ => {}
        }
    }
    for entry in fs::read_dir(&source).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("lib.rs") {
            for item in parse(&path).items {
                lines.extend(public_part(item, &exported).map(shown));
            }
        }
    }
    lines.into_iter().collect::<Vec<_>>().join("\n")
}

fn parse(path: &Path) -> syn::File {
    syn::parse_file(&fs::read_to_string(path).unwrap()).unwrap()
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn names_of(tree: &UseTree, names: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) => names_of(&path.tree, names),
        UseTree::Group(group) => group.items.iter().for_each(|item| names_of(item, names)),
        UseTree::Name(name) => {
            names.insert(name.ident.to_string());
        }
        UseTree::Rename(_) | UseTree::Glob(_) => panic!("lib.rs re-exports by name"),
    }
}

/// The item without what a user cannot see; `None` where nothing is left.
fn public_part(mut item: Item, exported: &BTreeSet<String>) -> Option<Item> {
    let is_exported = |name: &syn::Ident| exported.contains(&name.to_string());
    match &mut item {
        Item::Struct(one) if is_public(&one.vis) && is_exported(&one.ident) => {
            let fields = std::mem::replace(&mut one.fields, syn::Fields::Unit);
            one.fields = match fields {
                syn::Fields::Named(mut named) => {
                    let public = named.named.into_iter().filter(|field| is_public(&field.vis));
                    named.named = public
                        .map(|field| syn::Field {
                            attrs: Vec::new(),
                            ..field
                        })
                        .collect();
                    syn::Fields::Named(named)
                }
                other => other,
            };
        }
        Item::Enum(one) if is_public(&one.vis) && is_exported(&one.ident) => {
            one.variants
                .iter_mut()
                .for_each(|variant| variant.attrs.retain(is_seen));
        }
        Item::Const(one) if is_public(&one.vis) && is_exported(&one.ident) => {}
        Item::Impl(one) => {
            let syn::Type::Path(of) = one.self_ty.as_ref() else {
                return None;
            };
            if !of.path.get_ident().is_some_and(is_exported) {
                return None;
            }
            let is_trait = one.trait_.is_some();
            one.items.retain_mut(|item| {
                let ImplItem::Fn(function) = item else { return is_trait };
                function.attrs.retain(is_seen);
                function.block.stmts.clear();
                !is_trait && is_public(&function.vis)
            });
            if !is_trait && one.items.is_empty() {
                return None;
            }
        }
        _ => return None,
    }
    Some(bare(item))
}

/// Without comments and attributes that are nothing to a user.
fn bare(mut item: Item) -> Item {
    match &mut item {
        Item::Struct(one) => one.attrs.retain(is_seen),
        Item::Enum(one) => one.attrs.retain(is_seen),
        Item::Const(one) => one.attrs.retain(is_seen),
        Item::Impl(one) => one.attrs.retain(is_seen),
        Item::Use(one) => one.attrs.retain(is_seen),
        _ => {}
    }
    item
}

fn is_seen(attribute: &Attribute) -> bool {
    ["derive", "non_exhaustive", "default"]
        .iter()
        .any(|name| attribute.path().is_ident(name))
}

fn shown(item: Item) -> String {
    prettyplease::unparse(&syn::File {
        shebang: None,
        attrs: Vec::new(),
        items: vec![item],
    })
}
