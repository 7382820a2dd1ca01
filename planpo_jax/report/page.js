'use strict';

// Model and environment text reaches the document by textContent only.
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const shown = (value, digits = 3) =>
  value === null ? '–' : String(Number(value.toPrecision(digits)))
    .replace('-', '−');
const withUnit = (value, unit) =>
  unit === 'share' ? shown(100 * value) + '%' :
  unit === 'seconds' ? shown(value) + ' s' : shown(value, 4);

// Runs whose curves are switched off.
const hidden = new Set();

const setUpSwitches = () => {
  const section = document.getElementById('curves');
  if (!section) return;
  const drawn = (run) => section.querySelectorAll('.plot .r' + run);
  for (const box of section.querySelectorAll('.switches input')) {
    const run = Number(box.dataset.run);
    const light = (on) => {
      section.classList.toggle('dim', on);
      for (const part of drawn(run)) part.classList.toggle('lit', on);
    };
    const choose = () => {
      if (box.checked) hidden.delete(run);
      else hidden.add(run);
      for (const part of drawn(run)) {
        part.classList.toggle('off', !box.checked);
      }
    };
    box.addEventListener('change', choose);
    box.parentElement.addEventListener('pointerenter', () => light(true));
    box.parentElement.addEventListener('pointerleave', () => light(false));
    choose();  // A browser may remember boxes when a page is loaded again.
  }
};

const setUpCharts = ({plot, colours, charts}) => {
  for (const figure of document.querySelectorAll('[data-chart]')) {
    const chart = charts[Number(figure.dataset.chart)];
    const area = figure.querySelector('.plot');
    const cursor = figure.querySelector('.cursor');
    const tip = figure.querySelector('.tip');
    const [first, last] = chart.steps;
    const steps = [...new Set(chart.curves.flatMap(
      (curve) => curve.points.map(([step]) => step)))].sort((a, b) => a - b);
    let current = -1;

    const place = (step) =>
      plot.left + (step - first) / (last - first) * (plot.right - plot.left);
    const show = (index) => {
      current = Math.max(0, Math.min(steps.length - 1, index));
      const step = steps[current];
      cursor.setAttribute('x1', place(step));
      cursor.setAttribute('x2', place(step));
      cursor.classList.add('on');
      tip.replaceChildren(make('p', '', chart.axis + ' ' + step));
      const met = chart.curves
        .filter((curve) => !hidden.has(curve.run))
        .map((curve) => ({curve, point: curve.points.find(
          ([at]) => at === step)}))
        .filter(({point}) => point)
        .sort((a, b) => b.point[1] - a.point[1]);
      for (const {curve, point} of met) {
        const line = make('p');
        const [, value, ...band] =
          point.map((number) => withUnit(number, chart.unit));
        line.append(make('i', 's' + curve.run % colours),
                    `${curve.name} ${value}` +
                    (band.length ? ` (${band.join(' to ')})` : ''));
        tip.append(line);
      }
      tip.hidden = false;
      const share = place(step) / plot.width;
      // On the side of the cursor that has more room.
      tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : 'auto';
      tip.style.right =
        share < 0.5 ? 'auto' : `calc(${100 * (1 - share)}% + 10px)`;
    };
    const hide = () => {
      cursor.classList.remove('on');
      tip.hidden = true;
    };
    area.addEventListener('pointermove', (event) => {
      const box = area.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * plot.width;
      let nearest = 0;
      steps.forEach((step, i) => {
        const closer = Math.abs(place(step) - x) <
          Math.abs(place(steps[nearest]) - x);
        if (closer) nearest = i;
      });
      show(nearest);
    });
    area.addEventListener('pointerleave', hide);
    area.addEventListener('focus', () => {
      if (area.matches(':focus-visible')) {
        show(current < 0 ? steps.length - 1 : current);
      }
    });
    area.addEventListener('blur', hide);
    area.addEventListener('keydown', (event) => {
      const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!move) return;
      event.preventDefault();
      // Arrows elsewhere turn the pages of the transcripts.
      event.stopPropagation();
      show(current + move);
    });
  }
};

const tokensElement = ({ids, logps}, total) => {
  const root = make('details', 'tokens');
  root.append(make('summary', '', 'Response ids and log-probabilities'));
  // Built when it is opened: an episode may have thousands of tokens.
  root.addEventListener('toggle', () => {
    const list = make('p', 'ids');
    ids.forEach((id, i) => {
      const logp = logps[i] ?? null;
      const token = make('span', '', id === null ? '?' : String(id));
      token.append(make('small', '', shown(logp)));
      if (logp !== null) {
        const probability = Math.exp(Math.min(0, logp));
        token.title = `probability ${shown(100 * probability)}%`;
        token.style.setProperty('--surprise', (1 - probability).toFixed(3));
      }
      list.append(token, ' ');
    });
    const leftOut = total - ids.length;
    root.append(
      make('p', 'caption', 'Each id as sampled with its log-probability in ' +
        'nats; the less probable it was, the stronger its colour.' +
        (leftOut > 0 ? ` ${leftOut} further ids are left out.` : '')),
      list);
  }, {once: true});
  return root;
};

const turnElement = (turn, index, total) => {
  const item = make('li', 'turn');
  const side = make('aside');
  side.append(make('h3', '', `Turn ${index + 1} of ${total}`));
  const fact = (text, className) => side.append(make('p', className, text));
  if (turn.reward !== null) {
    fact(`reward ${turn.reward > 0 ? '+' : ''}${shown(turn.reward)}`,
         turn.reward > 0 ? 'good' : turn.reward < 0 ? 'bad' : '');
  }
  const {sampled} = turn;
  if (sampled) {
    const optional = (value, text) => value === null || fact(text);
    optional(sampled.prompt_tokens, `${sampled.prompt_tokens} prompt ids`);
    fact(`${turn.tokens} response ids`);
    optional(sampled.mean_logp,
             `mean log-prob ${shown(sampled.mean_logp)}`);
    optional(sampled.respond_s, `policy ${shown(sampled.respond_s)} s`);
    optional(sampled.env_s, `env ${shown(sampled.env_s)} s`);
  } else if (turn.tokens !== null) {
    fact(`${turn.tokens} tokens`);
  }
  fact(turn.valid ? 'valid format' : 'invalid format', turn.valid ? '' : 'bad');
  if (turn.truncated) fact('cut at the token limit', 'bad');
  if (turn.advantage !== null) fact(`advantage ${shown(turn.advantage)}`);
  const list = make('dl');
  for (const name of ['observation', 'response', 'action']) {
    list.append(make('dt', '', name),
                make('dd', name, turn[name] === '' ? '(empty)' : turn[name]));
  }
  const body = make('div');
  body.append(list);
  if (sampled && sampled.ids.length) {
    body.append(tokensElement(sampled, turn.tokens));
  }
  item.append(side, body);
  return item;
};

const episodeElement = (episode) => {
  const {run, file} = episode;
  const root = make('article', 'episode');
  root.append(make('h3', 'kicker', 'Goal'),
              make('p', 'goal', episode.goal || '(no goal was recorded)'));
  const facts = make('ul', 'facts');
  const fact = (text, className) => facts.append(make('li', className, text));
  fact(episode.success ? 'success' : 'no success',
       episode.success ? 'yes' : 'no');
  fact(`score ${shown(episode.score)}`);
  if (episode.return !== null) fact(`return ${shown(episode.return)}`);
  fact(`${episode.total_turns} turns`);
  fact(`${episode.tokens} response tokens`);
  if (episode.ending) fact(episode.ending);
  if (episode.start_s !== null) fact(`began at ${shown(episode.start_s)} s`);
  if (episode.reset_s !== null) fact(`reset in ${shown(episode.reset_s)} s`);
  fact(`${run} · ${file}`);
  if (episode.step !== null) fact(`step ${episode.step}`);
  const task = [episode.env, episode.split, episode.type].filter(Boolean);
  if (episode.index !== null) task.push(`#${episode.index}`);
  if (task.length) fact(task.join(' / '));
  if (episode.seed !== null) fact(`seed ${episode.seed}`);
  if (episode.member !== null) fact(`member ${episode.member} of its group`);
  root.append(facts);
  if (episode.fault) root.append(make('p', 'bad', 'Fault: ' + episode.fault));
  const turns = make('ol', 'turns');
  episode.turns.forEach((turn, index) =>
    turns.append(turnElement(turn, index, episode.total_turns)));
  root.append(turns);
  const leftOut = episode.total_turns - episode.turns.length;
  if (leftOut) {
    root.append(make('p', 'empty', `${leftOut} further turns are left out.`));
  }
  return root;
};

const setUpTranscripts = ({runs, files}) => {
  const section = document.getElementById('transcripts');
  if (!section.querySelector('.pager')) return;
  const at = (id) => document.getElementById(id);
  const episodes = files.flatMap((file) => file.episodes.map(
    (episode) => ({...episode, run: runs[file.run], file: file.name})));
  let chosen = episodes;
  let position = 0;

  const fill = (select, all, values) => {
    const before = select.value;
    select.replaceChildren(new Option(all, ''));
    // A prefix keeps an empty value apart from "all".
    for (const [value, label] of values) {
      select.add(new Option(label, '=' + value));
    }
    select.value = before;
    if (select.selectedIndex < 0) select.value = '';
  };
  const fillFiles = () => {
    const run = at('filter-run').value;
    const names = new Map();
    for (const file of files) {
      if (run && run !== '=' + runs[file.run]) continue;
      const [kept, total] = names.get(file.name) || [0, 0];
      names.set(file.name, [kept + file.episodes.length, total + file.total]);
    }
    fill(at('filter-file'), 'All files', [...names].map(
      ([name, [kept, total]]) => [name, kept === total ?
        `${name} (${total})` : `${name} (${kept} of ${total})`]));
  };
  const show = (index) => {
    position = Math.max(0, Math.min(chosen.length - 1, index));
    const none = chosen.length === 0;
    at('position').value = none ? 0 : position + 1;
    at('position').max = chosen.length;
    at('count').textContent = `of ${chosen.length}`;
    at('previous').disabled = none || position === 0;
    at('next').disabled = none || position === chosen.length - 1;
    at('episode').replaceChildren(none ?
      make('p', 'empty', 'No episode matches these filters.') :
      episodeElement(chosen[position]));
  };
  const choose = () => {
    const passes = (id, value) => {
      const wanted = at(id).value;
      return wanted === '' || wanted === '=' + value;
    };
    chosen = episodes.filter((episode) =>
      passes('filter-run', episode.run) &&
      passes('filter-file', episode.file) &&
      passes('filter-outcome', episode.success ? 'success' : 'failure') &&
      passes('filter-type', episode.type));
    show(0);
  };

  fill(at('filter-run'), 'All runs', runs.map((name) => [name, name]));
  fill(at('filter-outcome'), 'Success and failure',
       [['success', 'Success only'], ['failure', 'Failure only']]);
  fill(at('filter-type'), 'All task types',
       [...new Set(episodes.map((episode) => episode.type))].sort()
         .map((type) => [type, type || '(none)']));
  fillFiles();
  at('filter-run').addEventListener('change', fillFiles);
  for (const id of ['run', 'file', 'outcome', 'type']) {
    at('filter-' + id).addEventListener('change', choose);
  }
  at('previous').addEventListener('click', () => show(position - 1));
  at('next').addEventListener('click', () => show(position + 1));
  at('position').addEventListener('change', () =>
    show(Number(at('position').value) - 1));
  document.addEventListener('keydown', (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest('input, select, .scroll')) return;
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (move) show(position + move);
  });
  choose();
};

setUpCharts(read('curves-data'));
setUpSwitches();
setUpTranscripts(read('transcripts-data'));
