//! Generates the messages and stubs of `protos/` with protox, so that no protoc is needed.

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Asked when it runs: a script that was built for another place of the sources is not built anew for this one.
    let root = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join("../../protos");
    let folder = root.join("dragoman/v1");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    files.sort();
    let descriptors = protox::compile(files, [root])?;
    tonic_prost_build::configure()
        .build_server(false)
        .compile_fds(descriptors)?;
    Ok(())
}
