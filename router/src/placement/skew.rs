//! Compatibility between workers of different versions and configurations: which pairs may exchange KV, and which
//! workers have no partner.

use baton_types::{InstanceRecord, Mismatch};
use std::collections::BTreeMap;

/// A kind of workers: the labels under which they are counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind {
    /// Id of the model.
    pub(crate) model: String,
    /// Name of their pool of replicas.
    pub(crate) pool: String,
    pub(crate) role: &'static str,
}

impl Kind {
    /// The kind of a worker.
    pub(crate) fn of(worker: &InstanceRecord) -> Self {
        Self { model: worker.card.id.clone(), pool: worker.pool.clone(), role: worker.role.name() }
    }
}

/// Whether two workers of one role are compatible with the same workers: they agree in all fields that
/// [`InstanceRecord::check_partner`] compares.
pub(crate) fn pair_alike(one: &InstanceRecord, other: &InstanceRecord) -> bool {
    let card = |record: &InstanceRecord| (record.card.fingerprint, record.card.bundle);
    one.protocol == other.protocol
        && card(one) == card(other)
        && one.card.end_tokens == other.card.end_tokens
        && one.class == other.class
        && one.layout == other.layout
}

/// Why a worker can pair with no worker of the other role, as found with one of them. `None` if it has a partner, or
/// its model has no worker of the other role: decode workers prefill by themselves then.
pub(crate) fn why_unpaired(worker: &InstanceRecord, all: &[&InstanceRecord]) -> Option<Mismatch> {
    let others = all.iter().filter(|other| other.role != worker.role && other.card.id == worker.card.id);
    let mut mismatch = None;
    for other in others {
        match worker.check_partner(other) {
            Ok(()) => return None,
            Err(found) => mismatch = Some(found),
        }
    }
    mismatch
}

/// How many workers of each kind have no partner. Kinds without such workers are included with 0.
pub(crate) fn unpaired(all: &[&InstanceRecord]) -> BTreeMap<Kind, usize> {
    let mut counts = BTreeMap::new();
    for worker in all {
        *counts.entry(Kind::of(worker)).or_default() += usize::from(why_unpaired(worker, all).is_some());
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::record;
    use Role::{Decode, Prefill};
    use baton_types::{ProtocolRange, Role};

    type Change = fn(&mut InstanceRecord);

    const SAME: Change = |_| ();
    const REVISION: Change = |r| r.class.kernel_revision += 1;
    const MODEL: Change = |r| r.card.id = "other".into();
    const WEIGHTS: Change = |r| r.card.fingerprint.0[0] += 1;
    const TEMPLATE: Change = |r| r.card.bundle = Some(baton_types::Digest([9; 32]));
    const ENDS: Change = |r| r.card.end_tokens.push(77);
    const GREEN: Change = |r| (r.class.kernel_revision, r.pool) = (9, "green".into());
    const NEWER: Change = |r| r.protocol = ProtocolRange { min: 1, max: 2 };
    const NEWEST: Change = |r| r.protocol = ProtocolRange { min: 2, max: 3 };

    /// `model/pool/role count`, of the counts that are not 0.
    fn check(workers: &[(Role, Change)], expected: &str) {
        let records: Vec<InstanceRecord> = workers
            .iter()
            .map(|(role, change)| {
                let mut record = record(*role, "w");
                change(&mut record);
                record
            })
            .collect();
        let counts = unpaired(&records.iter().collect::<Vec<_>>());
        let told = counts.iter().filter(|(_, n)| **n > 0);
        let told: Vec<_> = told.map(|(kind, n)| format!("{}/{}/{} {n}", kind.model, kind.pool, kind.role)).collect();
        assert_eq!(told.join(", "), expected);
    }

    #[test]
    fn workers_without_a_partner_are_counted() {
        check(&[(Prefill, SAME), (Decode, SAME)], "");
        check(&[(Prefill, REVISION), (Decode, SAME)], "m/default/decode 1, m/default/prefill 1");
        check(&[(Prefill, REVISION), (Prefill, SAME), (Decode, SAME)], "m/default/prefill 1");
        check(&[(Prefill, REVISION), (Decode, SAME), (Decode, REVISION)], "m/default/decode 1");
        check(&[(Prefill, WEIGHTS), (Prefill, SAME), (Decode, SAME)], "m/default/prefill 1");
        check(&[(Prefill, TEMPLATE), (Prefill, SAME), (Decode, SAME)], "m/default/prefill 1");
        check(&[(Prefill, ENDS), (Prefill, SAME), (Decode, SAME)], "m/default/prefill 1");
        check(&[(Prefill, SAME), (Prefill, GREEN), (Prefill, GREEN), (Decode, SAME)], "m/green/prefill 2");
    }

    #[test]
    fn versions_pair_where_one_is_common() {
        check(&[(Prefill, SAME), (Decode, NEWER)], "");
        check(&[(Prefill, NEWER), (Decode, NEWEST)], "");
        check(&[(Prefill, SAME), (Decode, NEWEST)], "m/default/decode 1, m/default/prefill 1");
        check(&[(Prefill, SAME), (Prefill, NEWER), (Decode, NEWEST)], "m/default/prefill 1");
    }

    #[test]
    fn without_the_other_role_nothing_is_amiss() {
        check(&[(Decode, SAME), (Decode, REVISION)], "");
        check(&[(Prefill, SAME), (Decode, MODEL)], "");
    }
}
