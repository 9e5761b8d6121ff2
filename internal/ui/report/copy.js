// Copies a table as tab-separated lines. Everything else on this page works without.
for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.onclick = () => {
    const rows = [...button.parentElement.querySelectorAll("tr")];
    const text = document.createElement("textarea");
    text.value = rows.map(r => [...r.cells].map(c => c.textContent).join("\t")).join("\n") + "\n";
    document.body.append(text);
    text.select();
    const done = document.execCommand("copy");
    text.remove();
    button.textContent = done ? "copied" : "select the table and copy it by hand";
  };
}
