//! Ways to serve the same requests. Every sampled row, with its log-probabilities, is the one that the request has alone.

use crate::decoder::Decoder;
use anyhow::{Context, ensure};
use baton_kernels::sampling::Sampled;
use baton_kernels::step::{Delta, Join, RowId, SlotRows, StepInput};
use baton_types::{BlockId, BlockTables, GroupBlocks, SamplingParams, TokenId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::{HashMap, VecDeque};

/// A prompt, and how it goes on.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) prompt: Vec<TokenId>,
    pub(crate) sampling: SamplingParams,
    pub(crate) outputs: usize,
    /// Requests of one group begin with the same `common` tokens.
    group: usize,
    common: usize,
}

/// Requests with prompts of these lengths, in turn; two and two begin alike.
pub(crate) fn requests(count: usize, lengths: &[usize], outputs: usize, vocab: usize) -> Vec<Request> {
    let mut random = StdRng::seed_from_u64(5);
    let mut all: Vec<Request> = Vec::new();
    for i in 0..count {
        let len = lengths[i % lengths.len()];
        let mut prompt: Vec<TokenId> = (0..len).map(|_| random.random_range(0..vocab as TokenId)).collect();
        let mut common = 0;
        if i % 2 == 1 {
            let former = &mut all[i - 1];
            common = former.prompt.len().min(len).saturating_sub(1);
            former.common = common;
            prompt[..common].copy_from_slice(&former.prompt[..common]);
        }
        let sampling = SamplingParams {
            temperature: if i % 3 == 0 { 0.0 } else { 1.1 },
            top_p: if i % 4 == 1 { 0.9 } else { 1.0 },
            top_k: if i % 5 == 2 { 30 } else { 0 },
            repetition_penalty: if i % 2 == 0 { 1.2 } else { 1.0 },
            frequency_penalty: if i % 7 == 3 { 0.3 } else { 0.0 },
            seed: i as u64,
            max_tokens: outputs as u32,
            // They tell of every logit: the sum of shares is over all of them.
            logprobs: Some(20),
            ..SamplingParams::default()
        };
        all.push(Request { prompt, sampling, outputs, group: i / 2, common });
    }
    all
}

/// How rows behind the prompt are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Continuation {
    /// One by one, in graphs.
    Graph,
    /// One by one, kernel by kernel.
    Eager,
    /// At once, as drafts that are all accepted.
    Drafts,
}

/// One way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    /// Most sequences in a step.
    pub(crate) batch: usize,
    /// Most rows of a prompt in a step.
    pub(crate) chunk: usize,
    pub(crate) continuation: Continuation,
    /// Sequences lose their KV and begin anew after so many tokens.
    pub(crate) preempt: Option<usize>,
    /// The second of two requests takes the blocks that both begin with from the first.
    pub(crate) warm: bool,
}

impl Way {
    pub(crate) const ALONE: Self =
        Self { batch: 1, chunk: usize::MAX, continuation: Continuation::Eager, preempt: None, warm: false };
}

/// What each request sampled.
pub(crate) type Rows = Vec<Vec<Sampled>>;

struct Running {
    request: usize,
    slot: usize,
    tokens: Vec<TokenId>,
    /// Tokens whose KV is in the pool.
    computed: usize,
    blocks: Vec<BlockId>,
    /// Of these, how many belong to the cache.
    cached: usize,
    joined: bool,
    sampled: Vec<Sampled>,
}

struct Serving<'a> {
    decoder: &'a mut Decoder,
    requests: &'a [Request],
    /// What drafts are made of.
    known: &'a Rows,
    way: Way,
    free: Vec<BlockId>,
    slots: Vec<usize>,
    cache: HashMap<usize, Vec<BlockId>>,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    deltas: Vec<Delta>,
    done: Rows,
}

/// Serves all requests. `known` is what they sample, for drafts.
pub(crate) fn serve(decoder: &mut Decoder, requests: &[Request], known: &Rows, way: Way) -> anyhow::Result<Rows> {
    let blocks = decoder.map.blocks(0);
    let slots = (0..decoder.bounds.slots_max.min(way.batch)).rev().collect();
    let mut serving = Serving {
        free: (0..blocks).rev().map(BlockId).collect(),
        decoder,
        requests,
        known,
        way,
        slots,
        cache: HashMap::new(),
        waiting: VecDeque::new(),
        running: Vec::new(),
        deltas: Vec::new(),
        done: vec![Vec::new(); requests.len()],
    };
    // With a cache, the first of each group comes first.
    let second = |i: &usize| way.warm && i % 2 == 1;
    let (first, second): (Vec<usize>, Vec<usize>) = (0..requests.len()).partition(|i| !second(i));
    for part in [first, second] {
        serving.waiting.extend(part.into_iter().map(|request| serving_of(requests, request)));
        while !serving.waiting.is_empty() || !serving.running.is_empty() {
            serving.step()?;
        }
    }
    // The slots are free for the next way.
    let leave = StepInput { deltas: std::mem::take(&mut serving.deltas), ..StepInput::default() };
    let done = serving.done;
    decoder_leaves(serving.decoder, leave)?;
    Ok(done)
}

fn serving_of(requests: &[Request], request: usize) -> Running {
    let tokens = requests[request].prompt.clone();
    let (blocks, sampled) = (Vec::new(), Vec::new());
    Running { request, slot: 0, tokens, computed: 0, blocks, cached: 0, joined: false, sampled }
}

/// A step has rows: slots that end leave with a row of their last one.
fn decoder_leaves(decoder: &mut Decoder, mut leave: StepInput) -> anyhow::Result<()> {
    let Some(Delta::Leave { slot }) = leave.deltas.last().cloned() else { return Ok(()) };
    let tables = BlockTables::from_start(GroupBlocks(vec![vec![BlockId(0)]]));
    leave.deltas.push(Delta::Join(Box::new(Join { slot, tables, ..Join::default() })));
    leave.ids = vec![RowId::Token(0)];
    leave.segments = vec![SlotRows { slot, rows: 1, ..SlotRows::default() }];
    decoder.executable.launch(&leave, &mut |_, _| ())?;
    decoder.executable.finish()?;
    // It holds the slot; the next step of anyone frees it.
    decoder.held.push(slot);
    Ok(())
}

impl Serving<'_> {
    fn block(&self) -> usize {
        self.decoder.map.layout().block_tokens() as usize
    }

    /// One step of everything that runs.
    fn step(&mut self) -> anyhow::Result<()> {
        self.deltas.extend(self.decoder.held.drain(..).map(|slot| Delta::Leave { slot }));
        while let Some(slot) = self.slots.pop() {
            let Some(mut next) = self.waiting.pop_front() else {
                self.slots.push(slot);
                break;
            };
            next.slot = slot;
            let request = &self.requests[next.request];
            if let Some(blocks) = self.cache.get(&request.group).filter(|_| self.way.warm && next.blocks.is_empty()) {
                next.blocks = blocks.clone();
                next.cached = blocks.len();
                next.computed = blocks.len() * self.block();
            }
            self.running.push(next);
        }
        let mut step = StepInput { deltas: std::mem::take(&mut self.deltas), ..StepInput::default() };
        let mut of_segment = Vec::new();
        let mut logits = 0;
        for at in 0..self.running.len() {
            let Some((ids, samples)) = self.rows(at) else { continue };
            if step.ids.len() + ids.len() > self.decoder.bounds.rows_max
                || logits + samples > self.decoder.bounds.logit_rows_max
            {
                continue;
            }
            logits += samples;
            self.place(at, ids.len(), &mut step.deltas)?;
            let running = &self.running[at];
            let (slot, position, rows) = (running.slot, running.computed, ids.len());
            step.segments.push(SlotRows { slot, position, rows, samples, masks: Vec::new() });
            step.ids.extend(ids.into_iter().map(RowId::Token));
            of_segment.push(at);
        }
        ensure!(!of_segment.is_empty(), "no sequence has a row");
        if self.way.continuation == Continuation::Eager {
            step.observed = 0..self.decoder.shape.layers;
        }
        self.decoder.executable.launch(&step, &mut |_, _| ())?;
        let output = self.decoder.executable.finish()?;
        let mut sampled = output.sampled.into_iter();
        for (segment, at) in step.segments.iter().zip(of_segment) {
            let running = &mut self.running[at];
            running.computed += segment.rows;
            if segment.samples == 0 {
                continue;
            }
            for row in sampled.next().context("a slot without output")?.rows {
                let row = row?;
                running.tokens.push(row.token);
                running.sampled.push(row);
            }
        }
        self.end();
        Ok(())
    }

    /// The next rows of a sequence, and how many of them sample.
    fn rows(&self, at: usize) -> Option<(Vec<TokenId>, usize)> {
        let running = &self.running[at];
        let request = &self.requests[running.request];
        let left = &running.tokens[running.computed..];
        if self.way.continuation == Continuation::Drafts && left.len() <= self.way.chunk.max(1) {
            let known = &self.known[running.request];
            let mut ids = left.to_vec();
            ids.extend(known[..request.outputs - 1].iter().map(|row| row.token));
            return Some((ids, request.outputs));
        }
        let rows = left.len().min(self.way.chunk).min(self.decoder.bounds.rows_max);
        Some((left[..rows].to_vec(), usize::from(rows == left.len())))
    }

    /// Gives a sequence the blocks of its next rows.
    fn place(&mut self, at: usize, rows: usize, deltas: &mut Vec<Delta>) -> anyhow::Result<()> {
        let size = self.block();
        let running = &mut self.running[at];
        let (keep, needed) = (running.blocks.len(), (running.computed + rows).div_ceil(size));
        while running.blocks.len() < needed {
            running.blocks.push(self.free.pop().context("the pool is too small for this way")?);
        }
        let slot = running.slot;
        if running.joined {
            if needed > keep {
                let blocks = running.blocks[keep..].to_vec();
                deltas.push(Delta::Blocks { slot, group: 0, first: 0, keep, blocks });
            }
            return Ok(());
        }
        running.joined = true;
        let request = &self.requests[running.request];
        deltas.push(Delta::Join(Box::new(Join {
            slot,
            tables: BlockTables::from_start(GroupBlocks(vec![running.blocks.clone()])),
            tokens: running.tokens.clone(),
            prompt_len: request.prompt.len(),
            sampling: request.sampling.clone(),
            ..Join::default()
        })));
        Ok(())
    }

    /// Ends what has all its tokens, and takes the KV of what is preempted.
    fn end(&mut self) {
        let size = self.block();
        for at in (0..self.running.len()).rev() {
            let running = &self.running[at];
            let request = &self.requests[running.request];
            let sampled = running.sampled.len();
            // A draft that is not accepted ends a sequence early: its rows are missing.
            let is_drafted = self.way.continuation == Continuation::Drafts && sampled > 0;
            let is_done = sampled == request.outputs || is_drafted;
            // The token sampled last has no KV yet: it is computed anew with the rest.
            let decoded = running.computed + 1 == running.tokens.len() && sampled > 0;
            let is_preempted = decoded && self.way.preempt.is_some_and(|every| sampled.is_multiple_of(every));
            if !is_done && !is_preempted {
                continue;
            }
            let mut ended = self.running.swap_remove(at);
            self.deltas.push(Delta::Leave { slot: ended.slot });
            self.slots.push(ended.slot);
            let mut own = ended.blocks.split_off(ended.cached);
            if is_done && self.way.warm && ended.cached == 0 && !self.cache.contains_key(&request.group) {
                let rest = own.split_off((request.common / size).min(own.len()));
                self.cache.insert(request.group, std::mem::replace(&mut own, rest));
            }
            self.free.extend(own);
            if is_done {
                self.done[ended.request] = ended.sampled;
                continue;
            }
            (ended.computed, ended.cached, ended.joined) = (0, 0, false);
            ended.blocks.clear();
            self.waiting.push_back(ended);
        }
    }
}

/// Rows that differ.
pub(crate) fn different(got: &Rows, want: &Rows) -> usize {
    let pairs = got.iter().zip(want);
    pairs.map(|(got, want)| want.iter().enumerate().filter(|(i, row)| got.get(*i) != Some(row)).count()).sum()
}
