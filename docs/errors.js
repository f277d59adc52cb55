/* The box on "Find the error": what `gemma4-compat explain` says of a pasted error, in the reader's browser.

   A port of gemma4_compat/_doctor/explain/messages.py and search.py; tests/project/docs/test_errors_box.py compares them.
   Nothing is sent anywhere: tools/site.py writes what is known into the page. */
"use strict";

const explainError = (() => {
  const LONGEST = 1 << 18, LONGEST_MESSAGE = 4000, MOST = 8;
  const NARROWEST = 60, WIDEST = 240, BROKEN = 2;
  const ESCAPE = /\x1b\[[0-9;?]{0,16}[ -/]?[@-~]/g;
  const PREFIX = new RegExp(
    "^(?:\\[(?:rank|default)?\\d{1,5}\\]:? ?|E {2,6}|\\(\\w{1,40} pid=\\d{1,9}\\) ?|\\| {1,9}|(?:> ?){1,4}|[│┃] ?" +
    "|[\\w.-]{1,60} {1,20}\\| |\\[?\\d{4}-\\d\\d-\\d\\d[T ]\\d\\d:\\d\\d:\\d\\d[.,\\d]{0,10}(?:Z|[+-]\\d\\d:?\\d\\d)?\\]? " +
    "|\\[?\\d\\d:\\d\\d:\\d\\d[.,\\d]{0,10}\\] |\\d\\d-\\d\\d (?:\\d\\d:\\d\\d:\\d\\d )?\\[?[\\w./]{1,60}:\\d{1,6}\\] ?" +
    "|std(?:out|err) [FP] |(?:ERROR|CRITICAL|WARNING|INFO)(?::[\\w.-]{1,40}:|(?::|\\b) )){1,4}");
  const BORDERS = ["╭", "╰", "┏", "┗"];
  const SUFFIX = / *[│┃]$/;
  const ERROR = /^((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,120}(?:Error|Exception|Warning))(?:: ?(.{0,4000})|$)/;
  const INSIDE = /\b([A-Z]\w{0,120}(?:Error|Exception|Warning)): (.{1,4000})$/;
  const MODEL = /(?:[\w.-]{1,60}\/)?gemma-4-[\w.-]{0,60}\w/i;
  const FRAME =
    new RegExp("(?:File \"?|^)([^\"\\n]{1,400}?\\.py)\"?(?:(?:, line |:|\\()\\d{1,9}(?:, |\\)?:? ?)" +
      "(?:in (?:[\\w<>]{1,80}\\.){0,6}(<module>|\\w{1,120}))?| in (<module>|\\w{1,120})\\()");
  const OPEN = /\.py(?:",(?: line(?: \d{1,9},(?: in)?)?)?|:\d{1,9} in)$/, BARE = /\.py:\d{1,9}$/;

  function plain(line) {
    line = line.replace(ESCAPE, "").trimEnd();
    if (BORDERS.some(border => line.startsWith(border))) return "";
    return line.replace(PREFIX, "").replace(SUFFIX, "");
  }

  function unwrapped(lines) {
    const width = Math.max(0, ...lines.map(line => line.length));
    const after = lines.filter((_, at) => at && lines[at - 1].length === width);
    const indented = after.filter(line => line.startsWith("  ")).length;
    const full = NARROWEST <= width && width <= WIDEST && after.length >= BROKEN && indented <= after.length / 2;
    const joined = [];
    let broken = false;
    for (const line of lines) {
      const last = joined.length ? joined[joined.length - 1] : null, end = last === null ? "" : last.slice(-200);
      if (last !== null && (OPEN.test(end) || (line.startsWith("in ") && BARE.test(end))))
        joined[joined.length - 1] += " " + line.trimStart();
      else if (broken) joined[joined.length - 1] += line;
      else joined.push(line);
      broken = full && line.length === width;
    }
    return joined;
  }

  const spaced = text => text.split(/\s+/).filter(Boolean).join(" ");
  const goesOn = line => line.trim() && !line.startsWith("Traceback (") && !ERROR.test(line.slice(0, 5000));

  function errorsIn(lines) {
    const found = [];
    for (let at = 0; at < lines.length;) {
      const match = lines[at].length < 2 * LONGEST_MESSAGE ? ERROR.exec(lines[at]) : null;
      at += 1;
      if (!match) continue;
      const parts = [match[2] || ""];
      let length = parts[0].length;
      for (; at < lines.length && length < LONGEST_MESSAGE && goesOn(lines[at]); at += 1) {
        parts.push(lines[at]);
        length += lines[at].length;
      }
      found.push({kind: match[1].split(".").pop(), text: spaced(parts.join(" ")).slice(0, LONGEST_MESSAGE)});
    }
    return found;
  }

  function read(text) {
    const lines = unwrapped(text.slice(-LONGEST).split(/\r\n|\r|\n/).map(plain));
    const frames = lines.filter(line => line.includes(".py")).map(line => FRAME.exec(line.slice(0, 1000)))
      .filter(Boolean).map(match => ({file: match[1].replaceAll("\\", "/"), called: match[2] || match[3] || ""}));
    let found = errorsIn(lines);
    if (!found.length)
      found = lines.map(line => INSIDE.exec(line.slice(-5000))).filter(Boolean)
        .map(match => ({kind: match[1], text: match[2]}));
    if (!found.length) {
      const shown = spaced(lines.join(" ").slice(0, LONGEST_MESSAGE));
      found = shown ? [{kind: "", text: shown}] : [];
    }
    const seen = new Set(), messages = [];
    for (const one of found.slice(-MOST).reverse()) {
      const key = one.kind + "\n" + one.text;
      if (!seen.has(key)) messages.push(one);
      seen.add(key);
    }
    const named = lines.map(line => MODEL.exec(line.slice(-5000))).filter(Boolean).pop();
    return {messages, frames, model: named ? named[0] : ""};
  }

  const ENOUGH = 0.82, NEAR = 0.4, THROUGH = 2, WORDS = 400;
  const SHORT = 3, DESCRIPTION = 500;
  const PART = new RegExp("^(?:(?:.*_)?(?:proj\\w*|norm|attn|mlp|tower|embed\\w*|layers?|model|experts?|scal\\w*|bias\\w*|" +
    "weights?)|gemma\\w*(?:generation|lm|model|config|attention|layer))$");
  const LEFT_OUT = new Set(["cpu", "cuda", "xpu", "mps", "npu", "hpu", "x", "e", "a", "an", "the"]);
  const SAME = new Set(["RuntimeError", "NotImplementedError"]);

  function wordsOf(text) {
    const shown = text.slice(0, 4000).replace(/[\w.\-]*[\\/][\w.\-\\/]+|\.{2,}/g, " ");
    const left = (shown.match(/[A-Za-z_]\w*/g) || []).map(word => word.toLowerCase())
      .filter(word => !LEFT_OUT.has(word)).slice(0, WORDS);
    if (left.length) return left;
    return /[^0-9 ]/.test(text) ? [] : [/\d/.test(text) ? "<number>" : "<nothing>"];
  }

  const devices = text => (text.match(/\b(?:cpu|meta|cuda|xpu|mps)\b/g) || []).sort().join();

  function devicesAgree(known, text) {
    const [first, second] = [devices(known), devices(text)];
    return !first || !second ? 0 : first === second ? 1 : -1;
  }

  function common(first, second, weights) {
    let row = new Array(second.length + 1).fill(0);
    for (const word of first) {
      const above = row;
      row = [0];
      second.forEach((other, at) => {
        const both = word === other ? above[at] + weights[word] : 0;
        row.push(Math.max(both, above[at + 1], row[at]));
      });
    }
    return row[row.length - 1];
  }

  function covered(pattern, words, weights) {
    const whole = pattern.words.reduce((sum, word) => sum + weights[word], 0), present = new Set(words);
    const there = pattern.words.reduce((sum, word) => sum + (present.has(word) ? weights[word] : 0), 0);
    if (!whole || there < NEAR * whole) return 0;
    const size = 2 * pattern.words.length + 12, step = pattern.words.length + 6;
    let best = 0;
    for (let start = 0; start < Math.max(1, words.length - size + step); start += step)
      best = Math.max(best, common(pattern.words, words.slice(start, start + size), weights));
    return best / whole;
  }

  const LIBRARY = /^(?:.*\/)?((?:transformers|accelerate|peft|bitsandbytes)\/.*\.py)$/;
  const TORCH = /^(?:.*\/)?(torch\/(?!distributed\/(?:run|launcher|elastic)).*\.py)$/;
  const CALLS = "torch/nn/modules/module.py";
  const AROUND = ["transformers/utils/generic.py", "transformers/utils/output_capturing.py"];

  function placeOf(frames) {
    let called = "";
    for (const {file, called: name} of [...frames].reverse()) {
      const own = LIBRARY.exec(file), other = TORCH.exec(file);
      if (own && !AROUND.includes(own[1])) return `${own[1]} ${name}${called}`;
      if (other && other[1] !== CALLS) called = ` > ${other[1]} ${name}`;
    }
    const calls = frames.find(frame => frame.file.endsWith(CALLS));
    return calls ? `${CALLS} ${calls.called}` : null;
  }

  const isThere = (patch, place) => place !== null &&
    patch.places.some(known => known === place || known.split(" ", 1)[0] + " " === place);

  function seenOn(patch, frames) {
    let found = 0;
    const different = new Map(frames.map(frame => [frame.file + "\n" + frame.called, frame]));
    for (const {file, called} of different.values()) {
      if (patch.targets.some(([module, name]) => file.endsWith("/" + module) && (called === name || called === "")))
        found += THROUGH;
      if (patch.named.includes(called) && /\/(?:transformers|accelerate|peft|bitsandbytes)\//.test(file)) found += 1;
    }
    return found;
  }

  /* Numbers and booleans, the most important first. */
  function compared(first, second) {
    const at = first.findIndex((value, index) => value !== second[index]);
    return at < 0 ? 0 : first[at] > second[at] ? 1 : -1;
  }

  function alike(pattern, message) {
    const kinds = [pattern.kind, message.kind];
    return kinds.includes("") || kinds[0] === kinds[1] || kinds.every(kind => SAME.has(kind));
  }

  /* The other software in whose code a traceback ends. */
  function raisedBy(said, known) {
    for (const {file} of [...said.frames].reverse()) {
      const installed = /.*\/(?:site|dist)-packages\//.exec(file);
      const folders = (installed ? file.slice(installed[0].length) : file).split("/").slice(0, -1);
      const inside = installed ? folders.slice(0, 1) :
        folders.filter(name => folders.slice(0, -1).includes(name) || name.includes("_"));
      if (known.called.includes(inside[0]) || (!installed && file.includes("/lib/python3"))) continue;
      const program = known.programs.find(one => inside.some(name => new RegExp(`^(?:${one.folders})$`).test(name)));
      if (program || !installed || !inside.length || known.patched.includes(inside[0])) return program || null;
      return {name: inside[0], package: inside[0]};
    }
    return null;
  }

  function search(said, known) {
    const place = placeOf(said.frames), widely = new Set(known.common), elsewhere = raisedBy(said, known) !== null;
    for (const message of said.messages) {
      const found = new Map(), words = wordsOf(message.text), present = new Set(words);
      for (const pattern of known.patterns) {
        const patch = known.patches[pattern.patch];
        if (!alike(pattern, message)) continue;
        const own = pattern.kind === message.kind && pattern.kind !== "" && !widely.has(pattern.kind);
        const shaped = pattern.shape !== null && new RegExp(`^(?:${pattern.shape})$`).test(message.text);
        const named = pattern.names.some(name => present.has(name));
        const short = [...present].every(word => word === "<nothing>" || pattern.words.includes(word));
        const headline = named && words.every((word, at) => word === pattern.words[at]);
        const whole = shaped || (own && short) || headline;
        if (!whole && covered(pattern, words, known.weights) < ENOUGH) continue;
        if (!shaped && pattern.words.length <= 3 && words.length > pattern.words.length + 3) continue;
        if (elsewhere && !own && (shaped || !pattern.names.some(name => present.has(name) && !PART.test(name)))) continue;
        const seen = elsewhere ? 0 : seenOn(patch, said.frames), there = !elsewhere && isThere(patch, place);
        const certain = own || shaped || there || seen > 0 || named;
        const weight = shaped ? pattern.text.length : pattern.words.reduce((sum, word) => sum + known.weights[word], 0);
        const rank = [certain, there, devicesAgree(pattern.text, message.text), pattern.quoted, seen, weight,
          known.met_first.includes(pattern.patch)].map(Number);
        const before = found.get(pattern.patch);
        if (!before || compared(rank, before.rank) > 0) found.set(pattern.patch, {id: pattern.patch, certain, rank});
      }
      if (found.size) return [...found.values()].sort((one, other) => compared(other.rank, one.rank));
    }
    if (elsewhere) return [];
    const through = onTheWay(said, known);
    return through.length ? through : namedIn(said, known);
  }

  /* Put in other words: it has a name of one patch only. */
  function namedIn(said, known) {
    const owners = new Map();
    for (const pattern of known.patterns)
      for (const name of pattern.names) owners.set(name, (owners.get(name) || new Set()).add(pattern.patch));
    for (const message of said.messages) {
      const present = new Set(wordsOf(message.text));
      for (const pattern of known.patterns) {
        const only = pattern.names.some(name => present.has(name) && owners.get(name).size === 1 && !PART.test(name));
        if (only && alike(pattern, message)) return [{id: pattern.patch, certain: false, rank: []}];
      }
    }
    return [];
  }

  function onTheWay(said, known) {
    const found = new Map();
    for (const message of said.messages.slice(0, 1))
      for (const pattern of known.patterns) {
        if (pattern.kind !== message.kind || message.kind === "") continue;
        const seen = seenOn(known.patches[pattern.patch], said.frames);
        if (seen >= THROUGH) found.set(pattern.patch, {id: pattern.patch, certain: false, rank: [seen]});
      }
    return [...found.values()].sort((one, other) => other.rank[0] - one.rank[0]);
  }

  function fits(one, message, said) {
    const kind = !one.kinds || !/(?:Error|Exception|Warning)$/.test(message.kind) ||
      new RegExp(`^(?:${one.kinds})$`).test(message.kind);
    const there = !one.file || said.frames.some(frame => new RegExp(one.file).test(frame.file));
    return kind && there && new RegExp(one.text || "").test(message.text);
  }

  function isDescription(said) {
    const [message, ...others] = said.messages;
    return message && !others.length && !message.kind && !said.frames.length && message.text.length <= DESCRIPTION;
  }

  function marked(said, known) {
    const last = said.messages.length && !said.frames.length ? said.messages[0].text : "";
    if (!last || !(said.messages[0].kind || /error|fail/i.test(last))) return null;
    return known.programs.find(one => one.marks && new RegExp(one.marks, "i").test(last)) || null;
  }

  function advice(said, known) {
    let found = null;
    for (const last of [false, true])
      for (const message of said.messages)
        found = found || known.errors.find(one => Boolean(one.last) === last && fits(one, message, said));
    if (!found && isDescription(said) && !new RegExp(known.other_matters, "i").test(said.messages[0].text)) {
      const text = said.messages[0].text, both = [text, text.replaceAll("_", " ")];
      found = known.symptoms.find(one => one.words.every(words => both.some(each => new RegExp(words, "i").test(each))));
    }
    const program = raisedBy(said, known) || (found ? null : marked(said, known)), other = program && {
      what: `${program.name} raises this, in code that gemma4_compat does not change.`,
      to_do: [`Update it first: \`pip install -U ${program.package}\`. If it stays, its tracker is the place.`,
        ...(program.to_do ? [program.to_do] : [])].join(" "),
      more: program.more || "", patches: [], alone: false, name: "", symptom: false,
    };
    if (!found) return other;
    const variant = /E2B|E4B|12B|26B-A4B|31B/i.exec(said.model);
    const named = {model: said.model || "MODEL", variant: variant ? variant[0].toUpperCase() : "MODEL"};
    const to_do = found.to_do.replace(/{(model|variant)}/g, (_, name) => named[name]);
    const own = {what: found.what, to_do, more: found.more || "", patches: found.patches || [],
      alone: found.alone || false, name: found.name || "", symptom: Boolean(found.words)};
    return !other || own.alone ? own :
      {...own, what: `${own.what} ${other.what}`, to_do: `${own.to_do} ${other.to_do}`};
  }

  /* Patches whose description has the words: for failures that raise nothing. */
  function described(text, known) {
    const words = new Set(wordsOf(text).filter(word => word.length > SHORT));
    if (words.size < SHORT) return [];
    const all = Object.entries(known.patches).map(([id, patch]) => {
      const own = new Set(wordsOf(`${id} ${patch.symptom} ${patch.summary}`));
      return {id, has: [...words].filter(word => own.has(word))};
    });
    const count = word => all.filter(one => one.has.includes(word)).length;
    const weight = Object.fromEntries([...words].map(word => [word, Math.log(1 + all.length / (1 + count(word)))]));
    const sum = list => list.reduce((total, word) => total + weight[word], 0);
    return all.filter(one => sum(one.has) > sum([...words]) / 2)
      .sort((one, other) => sum(other.has) - sum(one.has)).slice(0, 3);
  }

  /* What is known of a text: patches, the most probable first, an advice, or both; or patches with its words. */
  return (text, known) => {
    const said = read(text), common = advice(said, known), error = said.messages.length ? said.messages[0] : null;
    const found = !error || (common && common.alone) ? [] : search(said, known);
    const certain = found.filter(match => match.certain).map(match => match.id);
    const told = common && !(common.symptom && found.length) && (!certain.length || certain.some(id => common.patches.includes(id))) ? common : null;
    const named = told && !certain.length ? told.patches.map(id => ({id, certain: false})) : [];
    const matches = [...named, ...found.filter(match => !named.some(one => one.id === match.id))];
    return {
      error,
      matches,
      advice: told,
      described: !matches.length && !told && isDescription(said) ? described(error.text, known) : [],
    };
  };
})();

if (typeof module !== "undefined") module.exports = explainError;

if (typeof document !== "undefined") {
  const known = JSON.parse(document.querySelector("#known-errors").textContent);
  const box = document.querySelector("#pasted-error"), answer = document.querySelector("#error-answer");
  box.parentElement.hidden = false; // without JavaScript it would answer nothing
  const element = (name, text, kind) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  /* ``code`` in a docstring, `code` in an advice. */
  const marked = text => {
    const made = element("p");
    text.split(/``(.+?)``|`(.+?)`/).forEach((part, at) => part && made.append(at % 3 ? element("code", part) : part));
    return made;
  };
  const card = ({id}) => {
    const patch = known.patches[id], made = element("div", "", "error"), link = element("a"), last = element("p");
    link.href = patch.entry;
    link.append(element("code", id));
    last.append("Repaired by ", link, `, for ${patch.releases}.`);
    made.append(marked(patch.symptom), marked(patch.summary), last);
    return made;
  };
  const show = () => {
    const found = explainError(box.value, known), shown = [];
    if (found.advice) {
      const alone = found.matches.length ? "" : " No patch is about that.";
      shown.push(marked(`${found.advice.what}${alone}`), marked(`To do: ${found.advice.to_do}`));
    }
    if (found.matches.length) {
      const certain = found.matches.filter(match => match.certain);
      if (!certain.length && !found.advice)
        shown.push(element("p", "Programs without Gemma 4 also raise this. With Gemma 4 it is one of these; the whole " +
          "traceback tells more."));
      shown.push(...(certain.length ? certain : found.matches).slice(0, 3).map(card));
    } else if (!found.advice && box.value.trim()) {
      shown.push(element("p", found.described.length ? "No known error has this text. Described with these words:" :
        "No known error has this text."), ...found.described.map(card));
    }
    answer.replaceChildren(...shown);
  };
  box.addEventListener("input", show);
  const asked = new URLSearchParams(location.search).get("error");
  if (asked) box.value = asked;
  show();
}
