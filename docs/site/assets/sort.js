// A click on the head of a table's column sorts its rows, and a second one sorts them the other way.
const number = (text) => {
  const found = /-?[\d,]*\.?\d+/.exec(text);
  return found ? parseFloat(found[0].replaceAll(",", "")) : NaN;
};

const sort = (table, column, up) => {
  const body = table.tBodies[0];
  const text = (row) => row.cells[column]?.textContent.trim() ?? "";
  const rows = [...body.rows];
  const numeric = rows.every((row) => /^[-±\d.,\s×%]*$/.test(text(row)));
  rows.sort((a, b) =>
    numeric ? number(text(a)) - number(text(b)) : text(a).localeCompare(text(b))
  );
  body.append(...(up ? rows : rows.reverse()));
};

document.addEventListener("click", (event) => {
  const head = event.target.closest("thead th");
  if (!head) return;
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const each of head.parentElement.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  sort(head.closest("table"), head.cellIndex, up);
});
