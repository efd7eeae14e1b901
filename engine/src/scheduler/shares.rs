//! Shares of tenants with one priority: of places, of blocks, and of the rows of a chunk.
//!
//! A tenant's share is its weight's part of places and blocks among the tenants with work here, and at least one sequence. In order, its
//! sequences that fit into the share are within it. The others are beyond it, come last, and get only what no other sequence needs. Whether
//! a sequence is within the share depends on which sequences exist, not on which run. So between two arrivals or ends, no two sequences
//! take blocks from each other in turn.

use super::entry::{Entry, Stage, Standing};
use super::{Awaited, Scheduler, SequenceKey};
use crate::fair::Wish;
use baton_types::{Share, TenantLabel};
use std::collections::BTreeMap;

/// A tenant's share, and the demand of its sequences so far.
#[derive(Default)]
struct Account {
    weight: usize,
    places: usize,
    blocks: usize,
}

/// All accounts, and the totals that they divide.
struct Accounts {
    tenants: BTreeMap<TenantLabel, Account>,
    weights: usize,
    places: usize,
    blocks: usize,
}

impl Accounts {
    /// Adds the next sequence of a tenant; returns whether it is beyond the share.
    fn is_beyond(&mut self, share: Share, blocks: usize) -> bool {
        let Some(account) = self.tenants.get_mut(&share.tenant) else { return false };
        account.places += 1;
        account.blocks += blocks;
        let exceeds = |asked: usize, all: usize| asked * self.weights > all * account.weight;
        account.places > 1 && (exceeds(account.places, self.places) || exceeds(account.blocks, self.blocks))
    }
}

/// Prefill rows left in a step.
#[derive(Debug)]
pub(super) struct PrefillRows {
    all: usize,
    /// Rows by priority and tenant; `None` where the first sequence gets all it can use.
    of_tenant: Option<BTreeMap<(i32, TenantLabel), usize>>,
}

impl PrefillRows {
    /// Rows that a sequence may use. A sequence whose tenant was assigned no rows because it lacks blocks may still try: the attempt marks
    /// the blocks as needed.
    pub(super) fn of(&self, key: SequenceKey, share: Share) -> usize {
        let of_tenant = self.of_tenant.as_ref().and_then(|all| all.get(&(key.priority(), share.tenant)));
        of_tenant.map_or(self.all, |rows| self.all.min(*rows))
    }

    /// A sequence uses this many rows.
    pub(super) fn take(&mut self, key: SequenceKey, share: Share, rows: usize) {
        self.all -= rows;
        let of_tenant = self.of_tenant.as_mut().and_then(|all| all.get_mut(&(key.priority(), share.tenant)));
        if let Some(of_tenant) = of_tenant {
            *of_tenant -= rows;
        }
    }

    /// Assigned rows that were not used.
    pub(super) fn unused(&self) -> usize {
        if self.of_tenant.is_some() { self.all } else { 0 }
    }
}

impl Scheduler {
    /// Determines which sequences are beyond their tenant's share, and so the order of all.
    pub(super) fn note_shares(&mut self) {
        let mut tenants: BTreeMap<TenantLabel, Account> = BTreeMap::new();
        for share in self.entries.values().map(|entry| entry.share).chain(self.awaited.map(|awaited| awaited.share)) {
            let account = tenants.entry(share.tenant).or_default();
            account.weight = account.weight.max(share.weight.get() as usize);
        }
        let before = std::mem::replace(&mut self.tenants, tenants.len());
        self.awaited_is_beyond = false;
        if before.max(self.tenants) < 2 {
            return;
        }
        let mut accounts = Accounts {
            weights: tenants.values().map(|account| account.weight).sum(),
            tenants,
            places: self.config.running_max,
            blocks: (self.pool.blocks_per_group() as usize).saturating_sub(self.config.watermark_blocks),
        };
        let mut awaited = self.awaited;
        let mut reserve = |accounts: &mut Accounts, before: Option<SequenceKey>| {
            let comes = awaited.take_if(|awaited| before.is_none_or(|key| awaited.turn < key));
            comes.map(|Awaited { share, blocks, .. }| accounts.is_beyond(share, blocks))
        };
        // A tenant that is alone gets everything, in the order of its sequences.
        let is_shared = self.tenants > 1;
        for (key, entry) in &mut self.entries {
            if let Some(is_beyond) = reserve(&mut accounts, Some(*key)) {
                self.awaited_is_beyond = is_shared && is_beyond;
            }
            let blocks = entry.len.div_ceil(self.config.block_tokens);
            entry.is_beyond = accounts.is_beyond(entry.share, blocks) && is_shared;
        }
        if let Some(is_beyond) = reserve(&mut accounts, None) {
            self.awaited_is_beyond = is_shared && is_beyond;
        }
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
    /// blocks.
    pub(super) fn reclaim_for_awaited(&mut self, preempted: &mut Vec<SequenceKey>) {
        let Some(awaited) = self.awaited.filter(|_| !self.awaited_is_beyond) else { return };
        let (place, needed) = (self.awaited_place(&awaited), awaited.blocks + self.config.watermark_blocks);
        let beyond = |scheduler: &Self| {
            let beyond = scheduler.after(place).filter(|(_, entry)| entry.is_beyond && entry.is_preemptable());
            beyond.map(|(place, _)| place).max()
        };
        let can = {
            let given = self.after(place).filter(|(_, entry)| entry.is_beyond && entry.is_preemptable());
            self.pool.free_min_without(given.filter_map(|(_, entry)| entry.lease.as_ref())) >= needed
        };
        while can && self.pool.free_min() < needed {
            let Some(victim) = beyond(self) else { break };
            self.preempt(victim.key(), preempted);
        }
    }

    /// Divides the rows of a step among tenants of one priority that have prefill, higher priorities first.
    pub(super) fn divide_rows(&mut self, ready: &[SequenceKey], all: usize) -> PrefillRows {
        if self.tenants < 2 {
            return PrefillRows { all, of_tenant: None };
        }
        let (mut left, mut of_tenant) = (all, BTreeMap::new());
        for level in ready.chunk_by(|a, b| a.priority() == b.priority()) {
            let priority = level[0].priority();
            let wishes = self.wishes(level, left);
            let gets = self.rows.divide(priority, &wishes, left);
            left -= gets.iter().sum::<usize>();
            of_tenant.extend(wishes.iter().zip(gets).map(|(wish, rows)| ((priority, wish.share.tenant), rows)));
        }
        PrefillRows { all, of_tenant: Some(of_tenant) }
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
                let needed = entry.len.div_ceil(self.config.block_tokens);
                if !*waits.entry(share.tenant).or_insert_with(|| self.can_reclaim(*key, needed)) {
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
