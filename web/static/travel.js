"use strict";
/* The slider goes to a record when it is released; arrow keys outside of fields step by message. */
(() => {
  const scrub = document.getElementById("scrub");
  if (scrub) {
    const field = scrub.form.elements.at;
    scrub.addEventListener("input", () => { field.value = scrub.value; });
    scrub.addEventListener("change", () => { location.href = `${scrub.dataset.base}?at=${scrub.value}`; });
  }
  addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea, button, summary, a")) return;
    const id = { ArrowLeft: event.shiftKey ? "record-before" : "before", ArrowRight: event.shiftKey ? "record-next" : "next" }[event.key];
    const link = id && document.getElementById(id);
    if (link && link.getAttribute("aria-disabled") !== "true") { event.preventDefault(); link.click(); }
  });
})();
