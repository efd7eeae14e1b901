//! What the draft model knows of one sequence.

use baton_kv_cache::{Lease, SharedPool, StateBefore};
use baton_types::{TokenId, seeded};

/// The KV of the first tokens of a sequence, and of proposals behind them.
#[derive(Debug)]
pub(super) struct Past {
    pub(super) lease: Lease,
    /// So many tokens of the sequence have KV.
    pub(super) computed: usize,
    /// Proposals that have KV behind those. Which of them became tokens shows when the sequence is seen next: the KV of the others counts
    /// for nothing, and is stored over.
    pub(super) ahead: Vec<TokenId>,
}

impl Past {
    /// Nothing yet; `None` if the pool has no block at all.
    pub(super) fn new(pool: &SharedPool) -> Option<Self> {
        let lease = pool.try_lease(&vec![0; pool.groups()])?;
        Some(Self { lease, computed: 0, ahead: Vec::new() })
    }

    /// How many leading tokens of the sequence have KV. Not the last one, whose row is computed again to sample.
    pub(super) fn known(&self, tokens: &[TokenId]) -> usize {
        let further = tokens.iter().skip(self.computed).zip(&self.ahead);
        let followed = match seeded!(RejectedDraftKept) {
            true => self.ahead.len(),
            false => further.take_while(|(token, proposal)| token == proposal).count(),
        };
        (self.computed + followed).min(tokens.len().saturating_sub(1))
    }

    /// Settles what is known of the sequence, and holds blocks for its next `positions`. `false` if the pool has too few.
    pub(super) fn continue_with(&mut self, tokens: &[TokenId], positions: usize) -> bool {
        self.computed = self.known(tokens);
        self.ahead.clear();
        self.lease.hold(self.computed..self.computed + positions, StateBefore::Replaced)
    }
}
