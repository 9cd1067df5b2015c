// Streams of searches, which answer in lines of JSON: a name to stop it by, progress, and the result or an error.
const query = (items) => new URLSearchParams(Object.entries(items).filter(([, text]) => text !== "" && text !== undefined && text !== null)).toString();
const stop = (name) => fetch(`/plan/stop?search=${name}`, { method: "POST" });

async function streamed(address, { signal, told, named }) {
  const answer = await fetch(address, { signal });
  if (!answer.ok) throw Object.assign(new Error("refused"), { said: (await answer.json()).error });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw Object.assign(new Error("ended"), { said: { message: "the search ended without an answer", hint: "try again" } });
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((text) => JSON.parse(text))) {
      if (line.search && named) named(line.search);
      if (line.progress) told(line.progress);
      if (line.error) throw Object.assign(new Error("refused"), { said: line.error });
      if (line.found) return line.found;
    }
  }
}
