//! What a router sees of its cluster.

use baton_types::{Incarnation, InstanceId, InstanceRecord, Party};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One registration: the same start that registers again has the same incarnation and a greater revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Registration {
    /// Which start of the instance.
    pub incarnation: Incarnation,
    /// Grows with every registration.
    pub revision: u64,
}

/// One registered instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    /// What it says of itself.
    pub record: Arc<InstanceRecord>,
    /// Under which registration.
    pub registration: Registration,
}

/// Everybody who is registered at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MembershipView {
    pub members: BTreeMap<InstanceId, Member>,
    /// Grows with every change.
    pub revision: u64,
}

impl MembershipView {
    /// The member, if this very start of it is registered.
    pub fn get(&self, party: &Party) -> Option<&Member> {
        self.members.get(&party.instance).filter(|m| m.registration.incarnation == party.incarnation)
    }
}
