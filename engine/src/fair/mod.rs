//! Weighted fair queueing among tenants: start-time fair queueing. Pure, and without a clock: its time is virtual.
//!
//! ```text
//! start  = max(virtual time, end of the tenant's previous request)
//! end    = start + tokens / weight
//! virtual time = start of the request served last
//! ```
//!
//! The request with the earliest virtual start is served first. A tenant with few requests has an end before virtual time, and starts
//! before the queued requests of others. A tenant with many requests starts later with each. Unused capacity is not saved up.
//!
//! Each priority has its own virtual time: service at a higher priority does not change the order below.
//!
//! Goyal, Vin, Cheng: *Start-time Fair Queueing*, SIGCOMM 1996.

#[cfg(test)]
mod tests;

use baton_kv_cache::PrefixHash;
use baton_types::{Share, TenantLabel, seeded};
use std::collections::BTreeMap;

/// Virtual time of one token of a tenant of weight 1. At weight 1000, rounding is less than two percent; the sum of 2^48 tokens fits.
const TOKEN: u64 = 1 << 16;
/// Priorities are clamped to plus or minus this, which bounds the number of levels.
const LEVEL_MAX: i32 = 100;
/// Most tenants that a level tracks. Beyond that the tenant with the earliest end is dropped; its next request counts as its first.
const TENANTS_MAX: usize = 4096;
/// A division hands out at least this many parts, so that small shares are exact to a part.
const PARTS: usize = 64;

/// A point in virtual time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Start(u64);

impl Start {
    fn after(self, tokens: usize, share: Share) -> Self {
        let weight = if seeded!(IgnoredWeights) { 1 } else { share.weight.get() };
        let spent = (tokens as u64).saturating_mul(TOKEN).div_ceil(u64::from(weight));
        Self(self.0.saturating_add(spent))
    }
}

/// A request's place in the order, and its charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entered {
    /// Virtual time at which its service starts: the earliest is served first.
    pub start: Start,
    /// Tokens charged to the tenant.
    pub tokens: usize,
}

/// A tenant's demand in a division.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The tenant and its weight.
    pub share: Share,
    /// Most that it can use.
    pub tokens: usize,
}

/// Whether a tenant may add `more` to a queue that is full by the sum over all tenants. It may if it has nothing queued, or stays within
/// its part of `max` by weight. A tenant that is alone has no part beyond the total.
pub fn is_within(have: impl IntoIterator<Item = (Share, u64)>, share: Share, more: u64, max: u64) -> bool {
    let mut weights = BTreeMap::from([(share.tenant, u64::from(share.weight.get()))]);
    let mut own = 0;
    for (other, has) in have.into_iter().filter(|(_, has)| *has > 0) {
        weights.entry(other.tenant).or_insert(u64::from(other.weight.get()));
        own += if other.tenant == share.tenant { has } else { 0 };
    }
    let (own_weight, all) = (weights[&share.tenant], weights.values().sum::<u64>());
    weights.len() > 1 && (own == 0 || (own + more).saturating_mul(all) <= max.saturating_mul(own_weight))
}

/// Virtual time and tenants of each priority.
#[derive(Debug, Default)]
pub struct FairOrder {
    levels: BTreeMap<i32, Level>,
}

#[derive(Debug, Default)]
struct Level {
    time: Start,
    /// Only tenants whose next start is later than virtual time.
    tenants: BTreeMap<TenantLabel, Tenant>,
}

#[derive(Debug)]
struct Tenant {
    /// End of its requests so far.
    end: Start,
    /// Its latest start: a tenant never overtakes itself.
    start: Start,
    /// Prompt of its latest sequence, where that uses the prefix cache.
    prompt: Option<PrefixHash>,
}

impl FairOrder {
    /// Enters a request of `tokens` and returns its place. A request with the same prompt as the tenant's previous sequence has the same
    /// start: they share the computation, and only its last token is charged.
    pub fn enter(&mut self, priority: i32, share: Share, tokens: usize, prompt: Option<PrefixHash>) -> Entered {
        let level = self.level(priority);
        let time = level.time;
        let new = || Tenant { end: time, start: time, prompt: None };
        let tenant = level.tenants.entry(share.tenant).or_insert_with(new);
        let is_sibling = prompt.is_some() && tenant.prompt == prompt;
        let (due, tokens) =
            if is_sibling { (tenant.start, tokens.min(1)) } else { (tenant.start.max(tenant.end), tokens) };
        let start = due.max(time);
        let end = tenant.end.max(start).after(tokens, share);
        *tenant = Tenant { end, start, prompt };
        level.forget();
        Entered { start, tokens }
    }

    /// A request with this start is served.
    pub fn served(&mut self, priority: i32, start: Start) {
        let level = self.level(priority);
        level.time = level.time.max(start);
        level.forget();
    }

    /// Refunds tokens that a tenant was charged for but that are not computed for it.
    pub fn give_back(&mut self, priority: i32, share: Share, tokens: usize) {
        if let Some(tenant) = self.level(priority).tenants.get_mut(&share.tenant) {
            let spent = Start::default().after(tokens, share).0;
            tenant.end = Start(tenant.end.0.saturating_sub(spent)).max(tenant.start);
        }
    }

    /// Divides `tokens` by weight among tenants, each with one demand. What one cannot use goes to the others; ties go to the first. A
    /// tenant that gets too little now is compensated next time.
    pub fn divide(&mut self, priority: i32, wishes: &[Wish], tokens: usize) -> Vec<usize> {
        let (mut gets, mut left, part) = (vec![0; wishes.len()], tokens, (tokens / PARTS).max(1));
        while left > 0 {
            let level = self.level(priority);
            let due = |share: Share| level.tenants.get(&share.tenant).map_or(level.time, |t| t.end.max(level.time));
            let wants = (0..wishes.len()).filter(|i| gets[*i] < wishes[*i].tokens);
            let Some(next) = wants.min_by_key(|i| due(wishes[*i].share)) else { break };
            let Wish { share, tokens } = wishes[next];
            let part = part.min(left).min(tokens - gets[next]);
            let Entered { start, .. } = self.enter(priority, share, part, None);
            self.served(priority, start);
            gets[next] += part;
            left -= part;
        }
        gets
    }

    /// Number of tracked tenants.
    pub fn tenants(&self) -> usize {
        self.levels.values().map(|level| level.tenants.len()).sum()
    }

    fn level(&mut self, priority: i32) -> &mut Level {
        self.levels.entry(priority.clamp(-LEVEL_MAX, LEVEL_MAX)).or_default()
    }
}

impl Level {
    /// Drops tenants whose end virtual time has reached, and the one with the earliest end if there are too many.
    fn forget(&mut self) {
        if self.tenants.len() > TENANTS_MAX
            && let Some(first) = self.tenants.values().map(|tenant| tenant.end.max(tenant.start)).min()
        {
            self.time = self.time.max(first);
        }
        self.tenants.retain(|_, tenant| tenant.end.max(tenant.start) > self.time);
    }
}
