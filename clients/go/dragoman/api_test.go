package dragoman

import (
	"bytes"
	"flag"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write testdata/api.txt")

const surface = "testdata/api.txt"

// TestPublicSurface compares every exported declaration with the listing: a change of the surface is to be seen in a diff.
func TestPublicSurface(t *testing.T) {
	listing := strings.Join(exported(t), "\n") + "\n"
	if *update {
		if err := os.WriteFile(surface, []byte(listing), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	frozen, err := os.ReadFile(surface)
	if err != nil {
		t.Fatal(err)
	}
	if listing != string(frozen) {
		t.Errorf("the public surface has changed; if that is meant, run: go test ./dragoman -run TestPublicSurface -update\n%s", listing)
	}
}

func exported(t *testing.T) []string {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := []string{}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.FileExports(file)
		for _, declaration := range file.Decls {
			found = append(found, declarations(t, files, declaration)...)
		}
	}
	slices.Sort(found)
	return found
}

// declarations are one line a function, constant or variable, and a type with its fields.
func declarations(t *testing.T, files *token.FileSet, declaration ast.Decl) []string {
	t.Helper()
	nodes := []any{}
	switch one := declaration.(type) {
	case *ast.FuncDecl:
		one.Body = nil
		nodes = append(nodes, one)
	case *ast.GenDecl:
		for _, spec := range one.Specs {
			if one.Tok != token.IMPORT {
				nodes = append(nodes, &ast.GenDecl{Tok: one.Tok, Specs: []ast.Spec{spec}})
			}
		}
	}
	texts := []string{}
	for _, node := range nodes {
		var text bytes.Buffer
		if err := printer.Fprint(&text, files, node); err != nil {
			t.Fatal(err)
		}
		texts = append(texts, text.String())
	}
	return texts
}
