/* A field above the table of model types: the rows whose name has what is typed stay. */
addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("#model-types table");
  if (!table) return;
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
  const field = document.createElement("input");
  Object.assign(field, { type: "search", placeholder: "a model type, such as gemma3", className: "search-table" });
  field.setAttribute("aria-label", "Model type");
  field.addEventListener("input", () => {
    for (const row of table.tBodies[0].rows)
      row.hidden = !plain(row.cells[0].textContent).includes(plain(field.value));
  });
  table.closest(".table-wrapper").before(field);
});
