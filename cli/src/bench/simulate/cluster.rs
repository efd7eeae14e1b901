//! A simulated cluster: workers around the real pools, a router around the real placement, and what happens between them.

use super::Settings;
use super::batch::Batch;
use super::clock::{Clock, ns};
use super::decode::Decode;
use super::names::Names;
use super::prefill::Prefill;
use super::rates::Rates;
use super::request::Request;
use super::router::{Asked, Router};
use super::worker::{Store, Told};
use crate::bench::trace::Trace;
use baton_kv_cache::PrefixHash;
use baton_types::LoadReport;
use baton_types::Role;
use std::collections::VecDeque;

/// What happens. Numbers of requests are those of the trace; workers are numbered, prefill workers first.
pub(super) enum Event {
    /// A request comes to the router.
    Arrives(usize),
    /// Its call comes to the prefill worker.
    AtPrefill(usize),
    /// Its claim, or its local prefill, comes to the decode worker.
    AtDecode(usize),
    /// The prefill worker has read what the decode worker had.
    Got(usize),
    /// The prompt is computed.
    Prefilled(usize),
    /// The first token comes to the router.
    FirstToken(usize),
    /// All KV is on the decode worker.
    Adopted(usize),
    /// A decode worker's steps are over.
    Stepped(usize, u64),
    /// The end comes to the router.
    Ends(usize),
    /// A worker reports its load.
    Reports(usize),
    /// The report comes to the router.
    Heard(usize, Box<LoadReport>),
    /// Cache events come to the router.
    Told(usize, Told),
}

/// The cluster.
pub(super) struct Cluster<'a> {
    pub(super) rates: &'a Rates,
    pub(super) trace: &'a Trace,
    pub(super) names: &'a Names,
    pub(super) clock: Clock<Event>,
    pub(super) router: Router,
    pub(super) prefill: Vec<Prefill>,
    pub(super) decode: Vec<Decode>,
    /// Whether a worker's next report is due at some time.
    pub(super) reports: Vec<bool>,
    pub(super) requests: Vec<Request>,
}

impl<'a> Cluster<'a> {
    /// An idle cluster.
    pub(super) fn new(
        settings: &Settings,
        rates: &'a Rates,
        trace: &'a Trace,
        names: &'a Names,
    ) -> anyhow::Result<Self> {
        let kinds = [
            (Role::Prefill, settings.prefill, settings.prefill_blocks),
            (Role::Decode, settings.decode, settings.decode_blocks),
        ];
        let pools: Vec<(Role, u32)> = kinds
            .into_iter()
            .flat_map(|(role, workers, blocks)| std::iter::repeat_n((role, blocks), workers))
            .collect();
        let store = |blocks| Store::new(blocks, settings.ttl);
        let prefill = (0..settings.prefill)
            .map(|_| Ok(Prefill { store: store(settings.prefill_blocks)?, queue: VecDeque::new(), running: None }));
        let decode = (0..settings.decode).map(|_| {
            let (store, batch) = (store(settings.decode_blocks)?, Batch::default());
            Ok(Decode { store, batch, claims: 0, claimed_tokens: 0, lacking: VecDeque::new() })
        });
        let mut cluster = Self {
            rates,
            trace,
            names,
            clock: Clock::new(),
            router: Router::new(settings, rates, trace.block_tokens, &pools)?,
            prefill: prefill.collect::<anyhow::Result<_>>()?,
            decode: decode.collect::<anyhow::Result<_>>()?,
            reports: vec![false; pools.len()],
            requests: trace.requests.iter().map(|_| Request::default()).collect(),
        };
        // The router knows an idle cluster before the first request comes.
        for worker in 0..pools.len() {
            let (report, now) = (cluster.report(worker), cluster.clock.instant());
            cluster.router.heard(worker, &report, now);
        }
        for (r, request) in trace.requests.iter().enumerate() {
            cluster.clock.post(u64::try_from(request.at.as_nanos()).unwrap_or(u64::MAX), Event::Arrives(r));
        }
        Ok(cluster)
    }

    /// Runs until nothing is left to happen.
    pub(super) fn run(&mut self) -> Vec<Request> {
        while let Some(event) = self.clock.next() {
            match event {
                Event::Arrives(r) => self.arrives(r),
                Event::AtPrefill(r) => self.at_prefill(r),
                Event::AtDecode(r) => self.at_decode(r),
                Event::Got(r) => self.got(r),
                Event::Prefilled(r) => self.prefilled(r),
                Event::FirstToken(r) => self.first_token(r),
                Event::Adopted(r) => self.adopted(r),
                Event::Stepped(d, boundary) => self.stepped(d, boundary),
                Event::Ends(r) => {
                    self.requests[r].end = Some(self.clock.now());
                    self.router.answered(self.trace.requests[r].output_tokens);
                }
                Event::Reports(w) => self.reports(w),
                Event::Heard(w, report) => self.router.heard(w, &report, self.clock.instant()),
                Event::Told(w, told) => self.router.told(w, &told),
            }
        }
        std::mem::take(&mut self.requests)
    }

    /// What all workers have, in their order.
    #[cfg(test)]
    pub(super) fn stores(&self) -> impl Iterator<Item = &super::worker::Store> {
        self.prefill.iter().map(|p| &p.store).chain(self.decode.iter().map(|d| &d.store))
    }

    pub(super) fn later(&mut self, seconds: f64, event: Event) {
        self.clock.post(self.clock.now() + ns(seconds), event);
    }

    pub(super) fn half_trip(&mut self, event: Event) {
        self.later(self.rates.router.round_trip_s / 2.0, event);
    }

    pub(super) fn prompt_tokens(&self, r: usize) -> u64 {
        self.trace.requests[r].prompt_tokens.into()
    }

    /// Blocks of a prompt that may come from a cache: never that of the last token.
    pub(super) fn reusable(&self, r: usize) -> usize {
        ((self.prompt_tokens(r) - 1) / u64::from(self.trace.block_tokens)) as usize
    }

    /// Their names, as far as they have some.
    pub(super) fn reusable_names(&self, r: usize) -> &'a [PrefixHash] {
        let (names, reusable) = (self.names.of(r), self.reusable(r));
        &names[..reusable.min(names.len())]
    }

    pub(super) fn blocks_for(&self, tokens: u64) -> usize {
        tokens.div_ceil(self.trace.block_tokens.into()) as usize
    }

    pub(super) fn tokens_of(&self, blocks: usize) -> u64 {
        blocks as u64 * u64::from(self.trace.block_tokens)
    }

    pub(super) fn arrives(&mut self, r: usize) {
        let asked = Asked {
            names: self.names.of(r),
            prompt_tokens: self.prompt_tokens(r),
            answer_tokens_max: self.trace.requests[r].output_tokens.into(),
        };
        match self.router.place(asked, self.clock.instant()) {
            Ok(decision) => {
                self.requests[r].decision = Some(decision);
                self.half_trip(Event::AtDecode(r));
                if decision.prefill.is_some() {
                    self.half_trip(Event::AtPrefill(r));
                }
            }
            Err(refusal) => {
                self.requests[r].refused = Some(refusal.kind());
                self.requests[r].end = Some(self.clock.now());
            }
        }
    }

    /// The prefill worker of a request and the decode worker, by their numbers among their kind.
    pub(super) fn placed(&self, r: usize) -> Option<(Option<usize>, usize)> {
        let decision = self.requests[r].decision?;
        Some((decision.prefill, decision.decode - self.prefill.len()))
    }

    pub(super) fn first_token(&mut self, r: usize) {
        let now = self.clock.now();
        self.requests[r].first_token = Some(now);
        if let Some((Some(p), _)) = self.placed(r) {
            self.router.first_token(p, self.names.of(r));
        }
    }
}
