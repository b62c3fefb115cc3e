"use strict";
/* A browser keeps six connections to a server: pages in the background release theirs, and are loaded again when they
   are visible. */
(() => {
  const sources = new Set();
  htmx.createEventSource = (url) => {
    const source = new EventSource(url);
    sources.add(source);
    return source;
  };
  /* An error of the server is shown in place of its answer. */
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (event.detail.xhr.status >= 400) { event.detail.shouldSwap = true; event.detail.isError = false; }
  });
  let stale = false;
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      stale ||= sources.size > 0;
      sources.forEach((source) => source.close());
      sources.clear();
    } else if (stale) {
      location.reload();
    }
  });
})();
