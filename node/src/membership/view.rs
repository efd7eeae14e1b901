//! A router's view of its cluster.

use baton_types::{Incarnation, InstanceId, InstanceRecord, Party};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One registration: if the same incarnation registers again, only the revision grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Registration {
    /// The incarnation of the instance.
    pub incarnation: Incarnation,
    /// Grows with every registration.
    pub revision: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    pub record: Arc<InstanceRecord>,
    pub registration: Registration,
}

/// All registered members at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MembershipView {
    pub members: BTreeMap<InstanceId, Member>,
    /// Grows with every change.
    pub revision: u64,
}

impl MembershipView {
    /// The member, if this incarnation of it is registered.
    pub fn get(&self, party: &Party) -> Option<&Member> {
        self.members.get(&party.instance).filter(|m| m.registration.incarnation == party.incarnation)
    }
}
