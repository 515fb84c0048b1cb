/* The service worker: once loaded, the playground needs no network. The build writes VERSION and
   FILES above; another version replaces all files at once. */

addEventListener("install", (event) => event.waitUntil(caches.open(VERSION)
  // no-cache: the browser's own cache may still have files of the version before
  .then((cache) => cache.addAll(FILES.map((file) => new Request(file, {cache: "no-cache"}))))
  .then(() => skipWaiting())));

addEventListener("activate", (event) => event.waitUntil(caches.keys()
  .then((names) => Promise.all(names
    .filter((name) => name.startsWith("playground-") && name !== VERSION)
    .map((name) => caches.delete(name))))
  .then(() => clients.claim())));

addEventListener("fetch", (event) => event.respondWith(
  caches.match(event.request, {ignoreSearch: true}).then((kept) => kept ?? fetch(event.request))));
