//! Shares of tenants with one priority: of places, of blocks, and of the rows of a chunk.
//!
//! A tenant's share is its weight's part of places and blocks (of the group that limits how many tokens fit) among the tenants with work here, and at least one sequence. In order, its
//! sequences that fit into the share are within it. The others are beyond it, come last, and get only what no other sequence needs. Whether
//! a sequence is within the share depends on which sequences exist, not on which run. So between two arrivals or ends, no two sequences
//! take blocks from each other in turn.

use super::entry::{Entry, Stage, Standing};
use super::memory::has;
use super::{Awaited, Scheduler, SequenceKey};
use crate::fair::Wish;
use baton_types::{Share, TenantLabel};
use std::collections::BTreeMap;

/// A tenant's share, and the demand of its sequences so far.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    weight: usize,
    places: usize,
    blocks: usize,
}

/// The demand of each tenant, and the places and blocks that they divide.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    tenants: BTreeMap<TenantLabel, Account>,
    weights: usize,
    places: usize,
    blocks: usize,
}

impl Accounts {
    /// Without tenants yet; `places` and `blocks` are what they divide.
    pub fn new(places: usize, blocks: usize) -> Self {
        Self { places, blocks, ..Self::default() }
    }

    /// A tenant has something here, and so a share.
    pub fn join(&mut self, share: Share) {
        let account = self.tenants.entry(share.tenant).or_default();
        let weight = account.weight.max(share.weight.get() as usize);
        self.weights += weight - account.weight;
        account.weight = weight;
    }

    /// Adds a sequence of a tenant.
    pub fn add(&mut self, share: Share, blocks: usize) {
        self.join(share);
        if let Some(account) = self.tenants.get_mut(&share.tenant) {
            account.places += 1;
            account.blocks += blocks;
        }
    }

    /// Adds the next sequence of a tenant; returns whether it is beyond the share. A tenant that is alone gets everything, in the order of
    /// its sequences.
    pub fn is_beyond(&mut self, share: Share, blocks: usize) -> bool {
        self.add(share, blocks);
        let account = self.tenants.get(&share.tenant).copied().unwrap_or_default();
        let exceeds = |asked: usize, all: usize| asked * self.weights > all * account.weight;
        let is_over = exceeds(account.places, self.places) || exceeds(account.blocks, self.blocks);
        self.tenants.len() > 1 && account.places > 1 && is_over
    }

    /// The same tenants, without their sequences.
    fn without_sequences(&self) -> Self {
        let tenants =
            self.tenants.iter().map(|(name, of)| (*name, Account { weight: of.weight, ..Account::default() }));
        Self { tenants: tenants.collect(), ..*self }
    }
}

/// Prefill rows left in a step.
#[derive(Debug)]
pub(super) struct PrefillRows {
    all: usize,
    /// Of them, how many rows' logits may come back.
    scored: usize,
    /// Both by priority and tenant; `None` where the first sequence gets all it can use.
    of_tenant: Option<BTreeMap<(i32, TenantLabel), OfTenant>>,
}

/// What a tenant was assigned of them, and has left.
#[derive(Debug)]
struct OfTenant {
    rows: usize,
    scored: usize,
}

impl PrefillRows {
    fn of_tenant(&self, key: SequenceKey, share: Share) -> Option<&OfTenant> {
        self.of_tenant.as_ref()?.get(&(key.priority(), share.tenant))
    }

    /// Rows that a sequence may use. A sequence whose tenant was assigned no rows because it lacks blocks may still try: the attempt marks
    /// the blocks as needed.
    pub(super) fn of(&self, key: SequenceKey, share: Share) -> usize {
        self.of_tenant(key, share).map_or(self.all, |left| self.all.min(left.rows))
    }

    /// How many of a sequence's rows may have logits that come back.
    pub(super) fn scored_of(&self, key: SequenceKey, share: Share) -> usize {
        self.of_tenant(key, share).map_or(self.scored, |left| self.scored.min(left.scored))
    }

    /// A sequence uses this many rows, and the logits of so many of them come back.
    pub(super) fn take(&mut self, key: SequenceKey, share: Share, rows: usize, scored: usize) {
        (self.all, self.scored) = (self.all - rows, self.scored - scored);
        let of_tenant = self.of_tenant.as_mut().and_then(|all| all.get_mut(&(key.priority(), share.tenant)));
        if let Some(left) = of_tenant {
            (left.rows, left.scored) = (left.rows - rows, left.scored - scored);
        }
    }

    /// Assigned rows that were not used, and how many rows' logits may come back yet.
    pub(super) fn unused(&self) -> (usize, usize) {
        (if self.of_tenant.is_some() { self.all } else { 0 }, self.scored)
    }
}

impl Scheduler {
    /// Determines which sequences are beyond their tenant's share, and so the order of all.
    pub(super) fn note_shares(&mut self) {
        let group = self.pool.shape().limiting();
        let blocks = (group.blocks as usize).saturating_sub(self.config.watermark_blocks);
        let (chunk, size) = (self.chunk(), self.config.block_tokens);
        let blocks_for = |tokens: usize| group.kind.blocks_at_once(tokens, chunk, size);
        let blocks_of = |entry: &Entry| blocks_for(entry.len);
        let mut all = Accounts::new(self.config.running_max, blocks);
        self.entries.values().for_each(|entry| all.add(entry.share, blocks_of(entry)));
        let mut accounts = all.without_sequences();
        self.accounts = all;
        self.awaited.iter().for_each(|awaited| accounts.join(awaited.share));
        let before = std::mem::replace(&mut self.tenants, accounts.tenants.len());
        self.awaited_is_beyond = false;
        if before.max(self.tenants) < 2 {
            return;
        }
        let mut awaited = self.awaited;
        let mut reserve = |accounts: &mut Accounts, before: Option<SequenceKey>| {
            let comes = awaited.take_if(|awaited| before.is_none_or(|key| awaited.turn < key));
            comes.map(|Awaited { share, tokens, .. }| accounts.is_beyond(share, blocks_for(tokens)))
        };
        for (key, entry) in &mut self.entries {
            if let Some(is_beyond) = reserve(&mut accounts, Some(*key)) {
                self.awaited_is_beyond = is_beyond;
            }
            entry.is_beyond = accounts.is_beyond(entry.share, blocks_of(entry));
        }
        if let Some(is_beyond) = reserve(&mut accounts, None) {
            self.awaited_is_beyond = is_beyond;
        }
    }

    /// What the sequences of each tenant hold or need, as of the last plan.
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Position of a sequence in the order of all.
    pub(super) fn place(&self, key: SequenceKey) -> Standing {
        Standing::new(key, self.entries.get(&key).is_some_and(|entry| entry.is_beyond))
    }

    /// Position of the waiting reservation.
    pub(super) fn awaited_place(&self, awaited: &Awaited) -> Standing {
        Standing::new(awaited.turn, self.awaited_is_beyond)
    }

    /// Sequences after a position, in no order.
    pub(super) fn after(&self, place: Standing) -> impl Iterator<Item = (Standing, &Entry)> {
        let all = self.entries.iter().map(|(key, entry)| (Standing::new(*key, entry.is_beyond), entry));
        all.filter(move |(other, _)| *other > place)
    }

    /// Takes blocks for a reservation within its tenant's share from sequences beyond theirs. Those come after it, or they keep their
    /// blocks. `false` if launched steps must be done first.
    pub(super) fn reclaim_for_awaited(&mut self, preempted: &mut Vec<SequenceKey>) -> bool {
        let Some(awaited) = self.awaited.filter(|_| !self.awaited_is_beyond) else { return true };
        let (place, needed) = (self.awaited_place(&awaited), self.kept(Some(awaited)));
        let beyond = |scheduler: &Self| {
            let beyond = scheduler.after(place).filter(|(_, entry)| entry.is_beyond && entry.is_preemptable());
            beyond.map(|(place, _)| place).max()
        };
        let can = {
            let given = self.after(place).filter(|(_, entry)| entry.is_beyond && entry.may_be_preempted());
            has(&self.pool.available_without(given.filter_map(|(_, entry)| entry.lease.as_ref())), &needed)
        };
        if can && !has(&self.pool.available(), &needed) && self.has_launched() {
            return false;
        }
        while can && !has(&self.pool.available(), &needed) {
            let Some(victim) = beyond(self) else { break };
            self.preempt(victim.key(), preempted);
        }
        true
    }

    /// Divides the rows of a step, and those whose logits may come back, among tenants of one priority that have prefill, higher priorities first.
    pub(super) fn divide_rows(&mut self, ready: &[SequenceKey], all: usize) -> PrefillRows {
        let scored = self.config.scored_rows_max;
        if self.tenants < 2 {
            return PrefillRows { all, scored, of_tenant: None };
        }
        let (mut left, mut of_tenant) = (all, BTreeMap::new());
        // In proportion to the rows, so that no tenant's long prompt keeps others' from theirs.
        let left_of = |rows: usize| OfTenant { rows, scored: (rows * scored / all).max(rows.min(1)) };
        for level in ready.chunk_by(|a, b| a.priority() == b.priority()) {
            let priority = level[0].priority();
            let wishes = self.wishes(level, left);
            let gets = self.rows.divide(priority, &wishes, left);
            left -= gets.iter().sum::<usize>();
            of_tenant
                .extend(wishes.iter().zip(gets).map(|(wish, rows)| ((priority, wish.share.tenant), left_of(rows))));
        }
        PrefillRows { all, scored, of_tenant: Some(of_tenant) }
    }

    /// Rows that each tenant can prefill now, at most `rows`. If its first waiting sequence finds no blocks, only its running sequences
    /// count.
    fn wishes(&self, level: &[SequenceKey], rows: usize) -> Vec<Wish> {
        let mut wishes: Vec<Wish> = Vec::new();
        let mut waits: BTreeMap<TenantLabel, bool> = BTreeMap::new();
        for key in level {
            let entry = &self.entries[key];
            if entry.is_decode() {
                continue;
            }
            let share = entry.share;
            let known = wishes.iter().position(|wish| wish.share.tenant == share.tenant);
            if known.is_some_and(|known| wishes[known].tokens >= rows) {
                continue;
            }
            if entry.stage == Stage::Waiting && entry.lease.is_none() {
                let needed = self.needs(entry.len);
                if !*waits.entry(share.tenant).or_insert_with(|| self.can_reclaim(*key, &needed)) {
                    continue;
                }
            }
            let tokens = entry.pending().min(rows);
            match known {
                Some(known) => wishes[known].tokens = (wishes[known].tokens + tokens).min(rows),
                None => wishes.push(Wish { share, tokens }),
            }
        }
        wishes
    }
}
