"use strict";
// The address that the command prints ends with the token, which browsers do not send to servers.
const given = location.pathname === "/login" ? decodeURIComponent(location.hash.slice(1)) : "";
if (given) {
  history.replaceState(null, "", "/login");
  document.getElementById("token").value = given;
}
// Without this script the form works too, and leads to the first page instead of the one asked for.
document.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = new URLSearchParams(new FormData(event.target));
  const answer = await fetch("/login", { method: "POST", body });
  if (!answer.ok) {
    document.getElementById("said").textContent = `${(await answer.json()).error}.`;
    return;
  }
  if (location.pathname === "/login") location.assign("/");
  else location.reload();
});
if (given) document.querySelector("form").requestSubmit();
