"""The /docs page: lists the routes of /openapi.json and tries them; no asset of another server."""

DOCS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Dragoman API</title>
<style>
  :root { color-scheme: light dark; }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  section { border-top: 1px solid #8886; padding: .5rem 0; }
  h2 { font-size: 1rem; margin: .3rem 0; font-family: ui-monospace, monospace; }
  textarea, pre { width: 100%; box-sizing: border-box; font: 14px/1.4 ui-monospace, monospace; }
  textarea { min-height: 8rem; }
  pre { white-space: pre-wrap; background: #8881; padding: .5rem; max-height: 24rem; overflow: auto; }
</style>
<h1>Dragoman API</h1>
<p>The document behind this page is <a href="openapi.json">openapi.json</a>.
   <label>API key, if one is set: <input id="key" type="password" autocomplete="off"></label></p>
<main id="routes" aria-live="polite">Loading.</main>
<script>
"use strict";
const main = document.getElementById("routes");
const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
async function call(method, path, input, output) {
  const key = document.getElementById("key").value;
  const headers = key ? { Authorization: "Bearer " + key } : {};
  const options = { method, headers };
  if (input) { options.body = input.value; headers["Content-Type"] = "application/json"; }
  output.textContent = "";
  try {
    const reply = await fetch(path, options);
    output.textContent = reply.status + "\\n";
    const reader = reply.body.getReader();
    const decoder = new TextDecoder();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      output.textContent += decoder.decode(value, { stream: true });
    }
  } catch (error) { output.textContent += "\\n" + error; }
}
fetch("openapi.json").then(reply => reply.json()).then(api => {
  main.textContent = "";
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const section = document.createElement("section");
      section.append(make("h2", method.toUpperCase() + " " + path), make("p", operation.summary || ""));
      let input = null;
      const body = operation.requestBody && operation.requestBody.content["application/json"];
      if (body) {
        input = document.createElement("textarea");
        input.setAttribute("aria-label", "Body of " + path);
        input.value = JSON.stringify(body.example || {}, null, 2);
        section.append(input);
      }
      const button = make("button", "Send");
      const output = document.createElement("pre");
      button.onclick = () => call(method.toUpperCase(), path, input, output);
      if (!path.includes("{")) section.append(button, output);
      main.append(section);
    }
  }
}).catch(error => { main.textContent = "openapi.json could not be read: " + error; });
</script>
</html>
"""
