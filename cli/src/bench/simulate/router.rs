//! The router's side: the real placement over the real index, fed by what workers say.

use super::Settings;
use super::rates::Rates;
use super::worker::{INCARNATION, Told, updates};
use anyhow::Context as _;
use baton_kv_cache::{CacheChange, CacheUpdate, HASH_TOKENS, PrefixHash, PrefixIndex};
use baton_router::pure::{
    Decision, Demand, Load, PendingPrefixes, PrefillPolicy, Refusal, Slowness, Thresholds, Worker, place,
};
use baton_types::LoadReport;
use baton_types::{
    Digest, Dtype, InstanceId, InstanceRecord, KvLayout, ModelCard, NumericsClass, Party, ProtocolRange, Role,
    SamplingDefaults,
};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A prompt whose prefix is in the making is forgotten after this time at the latest: longer than any queue that is of use.
const MAKING_MAX: Duration = Duration::from_secs(3600);
/// Blocks of the index, and prefixes in the making. The index takes memory by what it holds.
const BLOCKS_MAX: usize = 1 << 24;
/// Workers that have nothing new to say are silent here, and do not grow stale by it.
const STALE_MAX: Duration = Duration::from_secs(1 << 30);
/// Layouts know no larger blocks. Only room is judged by it, to the next block.
const LAYOUT_BLOCK_TOKENS: u32 = 128;

/// What the router knows.
pub(super) struct Router {
    workers: Vec<Known>,
    by_id: HashMap<InstanceId, usize>,
    index: PrefixIndex,
    making: PendingPrefixes,
    thresholds: Thresholds,
    block_tokens: u64,
    turn: u64,
    /// Tokens of answers so far, and their number.
    answers: (u64, u64),
    random: StdRng,
}

struct Known {
    id: InstanceId,
    record: Arc<InstanceRecord>,
    load: Load,
}

/// A prompt as the router sees it.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) names: &'a [PrefixHash],
    pub(super) prompt_tokens: u64,
    pub(super) answer_tokens_max: u64,
}

impl Router {
    /// A router that knows prefill and decode workers by their pools' blocks, in this order.
    pub(super) fn new(
        settings: &Settings,
        rates: &Rates,
        block_tokens: u32,
        pools: &[(Role, u32)],
    ) -> anyhow::Result<Self> {
        let thresholds = Thresholds {
            local_prefill_tokens_max: 256,
            prefill_tokens_per_s_default: rates.prefill.tokens_per_s,
            policy: settings.policy,
            prefill_doubles_at_tokens: rates.prefill_doubles_at_tokens(),
            transfer_bytes_per_s: rates.transfer.bytes_per_s,
            gets: settings.gets,
        };
        let mut index = PrefixIndex::new(BLOCKS_MAX);
        let mut workers = Vec::new();
        for (number, (role, blocks)) in pools.iter().enumerate() {
            let id = InstanceId::try_new(format!("{}-{number}", role.name()))?;
            index.join(&id, INCARNATION, HASH_TOKENS as u32).context("too many workers")?;
            let nothing = CacheChange::Snapshot { part: 0, last: true, blocks: &[] };
            index.apply(&id, CacheUpdate { incarnation: INCARNATION, sequence: 0, change: nothing });
            let record = Arc::new(record(&id, *role, u64::from(*blocks) * u64::from(block_tokens), rates)?);
            workers.push(Known { id, record, load: Load::default() });
        }
        let by_id = workers.iter().enumerate().map(|(w, known)| (known.id.clone(), w)).collect();
        Ok(Self {
            workers,
            by_id,
            index,
            making: PendingPrefixes::new(BLOCKS_MAX),
            thresholds,
            block_tokens: block_tokens.into(),
            turn: 0,
            answers: (0, 0),
            random: StdRng::seed_from_u64(settings.seed),
        })
    }

    /// Places a request, as the flow of the router does.
    pub(super) fn place(&mut self, asked: Asked<'_>, now: Instant) -> Result<Decision, Refusal> {
        let demand = Demand {
            prompt_tokens: asked.prompt_tokens,
            total_tokens: asked.prompt_tokens + asked.answer_tokens_max,
            answer_tokens: (self.answers.0 / self.answers.1.max(1)).clamp(1, asked.answer_tokens_max),
            policy: PrefillPolicy::Auto,
            time_left: Duration::MAX,
            slowness: Slowness::default(),
            longest: Duration::ZERO,
            turn: self.turn,
        };
        let (view, places) = self.view(asked, now);
        let random = &mut self.random;
        let mut decision = place(&view, &demand, &self.thresholds, &mut |n| random.random_range(0..n))?;
        decision.decode = places[decision.decode];
        decision.prefill = decision.prefill.map(|p| places[p]);
        self.turn += 1;
        let local_work = if decision.prefill.is_some() { 0 } else { decision.work_tokens };
        self.workers[decision.decode].load.placed(local_work, demand.prompt_tokens);
        if let Some(prefill) = decision.prefill.map(|p| &self.workers[p]) {
            prefill.load.placed(decision.work_tokens, demand.prompt_tokens);
            self.making.placed(&prefill.id, asked.names, now + MAKING_MAX);
        }
        Ok(decision)
    }

    /// What placement sees, and which worker each of it is.
    fn view(&self, asked: Asked<'_>, now: Instant) -> (Vec<Worker>, Vec<usize>) {
        // Never the block that holds the last token.
        let reusable = ((asked.prompt_tokens - 1) / self.block_tokens) as usize;
        let names = &asked.names[..reusable.min(asked.names.len())];
        let mut cached = vec![0; self.workers.len()];
        for found in self.index.lookup(names) {
            if let Some(&w) = self.by_id.get(found.worker) {
                cached[w] = found.tokens;
            }
        }
        let of = |(w, known): (usize, &Known)| {
            let load = known.load.measured(now, STALE_MAX)?;
            let named = match known.record.role {
                Role::Prefill => self.making.tokens(&known.id, names, cached[w], HASH_TOKENS, now),
                Role::Decode => cached[w],
            };
            let cached_tokens = (named / HASH_TOKENS) as u64 * self.block_tokens;
            Some((Worker { record: known.record.clone(), group: None, load, not_with: Vec::new(), cached_tokens }, w))
        };
        self.workers.iter().enumerate().filter_map(of).unzip()
    }

    /// The first token of a prompt came: what its worker says of its cache counts from now on.
    pub(super) fn first_token(&mut self, prefill: usize, names: &[PrefixHash]) {
        self.making.ended(&self.workers[prefill].id, names);
    }

    /// An answer ended.
    pub(super) fn answered(&mut self, tokens: u32) {
        self.answers = (self.answers.0 + u64::from(tokens), self.answers.1 + 1);
    }

    /// A worker's load report came.
    pub(super) fn heard(&mut self, worker: usize, report: &LoadReport, now: Instant) {
        let known = &self.workers[worker];
        known.load.report(report, &known.record, now);
    }

    /// A worker's cache events came.
    pub(super) fn told(&mut self, worker: usize, (first, changes): &Told) {
        let id = &self.workers[worker].id;
        for update in updates(*first, changes) {
            self.index.apply(id, update);
        }
    }

    /// Blocks that the index believes a worker to have.
    #[cfg(test)]
    pub(super) fn blocks_of(&self, worker: usize) -> usize {
        self.index.blocks_of(&self.workers[worker].id)
    }
}

fn record(id: &InstanceId, role: Role, capacity_tokens: u64, rates: &Rates) -> anyhow::Result<InstanceRecord> {
    // One KV head of as many elements as a layer has: only the bytes of a token are looked at.
    let head_dim = rates.kv.bytes_per_token / rates.transfer.layers / 4;
    let layout = KvLayout::llama(LAYOUT_BLOCK_TOKENS, rates.transfer.layers, 1, head_dim, Dtype::Bf16)?;
    Ok(InstanceRecord {
        party: Party { instance: id.clone(), incarnation: INCARNATION },
        role,
        labels: BTreeMap::new(),
        pool: "default".into(),
        endpoint: String::new(),
        card: ModelCard {
            id: "simulated".into(),
            served_names: Vec::new(),
            revision: String::new(),
            fingerprint: Digest([0; 32]),
            context_max: u32::MAX,
            vocab: 0,
            end_tokens: Vec::new(),
            defaults: SamplingDefaults::default(),
            bundle: None,
        },
        protocol: ProtocolRange::CURRENT,
        layout,
        class: NumericsClass { isa: "simulated".into(), weights: Dtype::Bf16, kv: Dtype::Bf16, kernel_revision: 1 },
        capacity_tokens,
        running_max: rates.decode.running_max,
        // No request is refused for a queue: all policies are to serve the same.
        waiting_max: u32::MAX,
        shards: Vec::new(),
        capabilities: Vec::new(),
    })
}
