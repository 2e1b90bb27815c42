// Column headings sort: a click by what is better first, another the other way round; what is empty stays last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), headings = [...heading.parentNode.children];
    const first = heading.dataset.first, other = first === "ascending" ? "descending" : "ascending";
    const order = heading.getAttribute("aria-sort") === first ? other : first;
    headings.forEach(other => other.hasAttribute("aria-sort") && other.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", order);
    const column = headings.indexOf(heading), body = heading.closest("table").tBodies[0];
    const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent.trim();
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const numbers = x - y;
      return sign * (Number.isNaN(numbers) ? x.localeCompare(y) : numbers);
    });
    body.append(...rows);
  });
}
