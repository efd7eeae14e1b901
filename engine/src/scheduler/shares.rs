//! What tenants of one priority are due beside each other: of places and blocks, and of the rows of a chunk.
//!
//! A tenant is due its weight's part of places and blocks among the tenants that have anything here, and at least one sequence. In the
//! order of its sequences, those that fit into that are within its share; the others are beyond it, come last, and have only what nobody
//! else asks for. Who is within depends on which sequences there are, not on which run. So between two arrivals or ends nobody takes from
//! one that takes it back.

use super::entry::{Entry, Stage, Standing};
use super::{Awaited, Scheduler, SequenceKey};
use crate::fair::Wish;
use baton_types::{Share, TenantLabel};
use std::collections::BTreeMap;

/// What a tenant is due, and what its sequences so far ask for.
#[derive(Default)]
struct Account {
    weight: usize,
    places: usize,
    blocks: usize,
}

/// All accounts, and what they share.
struct Accounts {
    tenants: BTreeMap<TenantLabel, Account>,
    weights: usize,
    places: usize,
    blocks: usize,
}

impl Accounts {
    /// Adds the next sequence of a tenant; whether it is beyond its share.
    fn is_beyond(&mut self, share: Share, blocks: usize) -> bool {
        let Some(account) = self.tenants.get_mut(&share.tenant) else { return false };
        account.places += 1;
        account.blocks += blocks;
        let exceeds = |asked: usize, all: usize| asked * self.weights > all * account.weight;
        account.places > 1 && (exceeds(account.places, self.places) || exceeds(account.blocks, self.blocks))
    }
}

/// Rows of prefill that a step has left.
#[derive(Debug)]
pub(super) struct PrefillRows {
    all: usize,
    /// Of each priority and tenant; `None` where the first gets all it can use.
    of_tenant: Option<BTreeMap<(i32, TenantLabel), usize>>,
}

impl PrefillRows {
    /// What a sequence may use. One of a tenant that was given nothing because it lacks blocks may try: that is how others learn of it.
    pub(super) fn of(&self, key: SequenceKey, share: Share) -> usize {
        let of_tenant = self.of_tenant.as_ref().and_then(|all| all.get(&(key.priority(), share.tenant)));
        of_tenant.map_or(self.all, |rows| self.all.min(*rows))
    }

    /// A sequence uses so many.
    pub(super) fn take(&mut self, key: SequenceKey, share: Share, rows: usize) {
        self.all -= rows;
        let of_tenant = self.of_tenant.as_mut().and_then(|all| all.get_mut(&(key.priority(), share.tenant)));
        if let Some(of_tenant) = of_tenant {
            *of_tenant -= rows;
        }
    }

    /// What is left although somebody was to have it.
    pub(super) fn unused(&self) -> usize {
        if self.of_tenant.is_some() { self.all } else { 0 }
    }
}

impl Scheduler {
    /// Notes who is beyond the share of its tenant, and so the order of all.
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
        // Whoever is alone has all, in its own order.
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

    /// Standing of a sequence in the order of all.
    pub(super) fn place(&self, key: SequenceKey) -> Standing {
        Standing::new(key, self.entries.get(&key).is_some_and(|entry| entry.is_beyond))
    }

    /// Standing of the reservation that waits.
    pub(super) fn awaited_place(&self, awaited: &Awaited) -> Standing {
        Standing::new(awaited.turn, self.awaited_is_beyond)
    }

    /// Those who come after a place, in no order.
    pub(super) fn after(&self, place: Standing) -> impl Iterator<Item = (Standing, &Entry)> {
        let all = self.entries.iter().map(|(key, entry)| (Standing::new(*key, entry.is_beyond), entry));
        all.filter(move |(other, _)| *other > place)
    }

    /// Blocks for a reservation within its tenant's share, from sequences that are beyond theirs. They come after it, or they keep what
    /// they have.
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

    /// Divides the rows of a step among tenants of one priority that have something to prefill, the higher priority first.
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

    /// What each tenant has to prefill now, at most `rows`. Of one whose first that waits finds no blocks, only what runs counts.
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
