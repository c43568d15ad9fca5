/** The public surface is held in tests/api.txt: a change of it is to be seen in a diff. */

import assert from "node:assert/strict";
import { readFile, writeFile } from "node:fs/promises";
import { test } from "node:test";

import ts from "typescript";

const ENTRY = new URL("../src/index.d.ts", import.meta.url);
const FROZEN = new URL("../../tests/api.txt", import.meta.url);

async function statementsOf(url: URL): Promise<ts.SourceFile> {
  return ts.createSourceFile(url.pathname, await readFile(url, "utf8"), ts.ScriptTarget.Latest);
}

/** Names and modules of what the entry exports, which does nothing else. */
async function exported(): Promise<{ name: string; module: string }[]> {
  return (await statementsOf(ENTRY)).statements.flatMap((statement) => {
    assert.ok(ts.isExportDeclaration(statement) && statement.exportClause && statement.moduleSpecifier);
    assert.ok(ts.isNamedExports(statement.exportClause) && ts.isStringLiteral(statement.moduleSpecifier));
    const module = statement.moduleSpecifier.text.replace(/\.js$/, ".d.ts");
    return statement.exportClause.elements.map(({ name }) => ({ name: name.text, module }));
  });
}

function declares(statement: ts.Statement, name: string): boolean {
  if (ts.isVariableStatement(statement)) {
    return statement.declarationList.declarations.some((one) => ts.isIdentifier(one.name) && one.name.text === name);
  }
  const named = ts.isClassDeclaration(statement) || ts.isInterfaceDeclaration(statement);
  return (named || ts.isTypeAliasDeclaration(statement)) && statement.name?.text === name;
}

/** Every exported declaration without its comments; of a protocol message only the name. */
async function surface(): Promise<string> {
  const printer = ts.createPrinter({ removeComments: true });
  const shown = (await exported()).map(async ({ name, module }) => {
    if (module.includes("/gen/")) {
      return `message ${name}`;
    }
    const file = await statementsOf(new URL(module, ENTRY));
    const found = file.statements.find((statement) => declares(statement, name));
    assert.ok(found, `${name} is not declared in ${module}`);
    return printer.printNode(ts.EmitHint.Unspecified, found, file);
  });
  return `${(await Promise.all(shown)).sort().join("\n")}\n`.replaceAll(/^ *#private;\n/gm, "");
}

test("the public surface is the frozen one", async () => {
  const listing = await surface();
  const update = process.env["UPDATE_SURFACE"];
  if (update !== undefined) {
    await writeFile(update, listing);
    return;
  }
  const frozen = await readFile(FROZEN, "utf8");
  assert.equal(listing, frozen, "if that is meant, run the tests with UPDATE_SURFACE=PATH of tests/api.txt");
});
