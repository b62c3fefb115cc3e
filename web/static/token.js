"use strict";
/* The token is typed once for many forms: it is kept for this tab alone, of this host and port, for 15 minutes. One that
   was refused is forgotten. */
(() => {
  const KEPT_MS = 15 * 60 * 1000;
  const kept = () => {
    const [token, end] = JSON.parse(sessionStorage.getItem("token") || '["", 0]');
    return Date.now() < end ? [token, end] : ["", 0];
  };
  let timer = 0;
  const fill = () => {
    if (document.querySelector("[data-refused]")) sessionStorage.removeItem("token");
    const [token, end] = kept();
    for (const field of document.querySelectorAll("form[method=post] input[name=token]")) {
      const label = field.closest("label");
      if (token || label.hidden) field.value = token;
      label.hidden = token !== "";
    }
    clearTimeout(timer);
    if (token) timer = setTimeout(fill, end - Date.now());
  };
  document.addEventListener("submit", (event) => {
    const field = event.target.method === "post" && event.target.elements.token;
    if (field && field.value && field.value !== kept()[0]) {
      sessionStorage.setItem("token", JSON.stringify([field.value, Date.now() + KEPT_MS]));
    }
  }, true);
  document.addEventListener("htmx:afterSwap", fill);
  addEventListener("pageshow", fill);
})();
