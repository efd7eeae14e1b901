//! Turns by tenant: however many requests of one tenant wait, each other tenant waits for a few of them at most.

use baton_types::TenantLabel;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// So many turns at once. As many requests of each tenant ask for them, and its others wait for those, so the tenants
/// take turns.
#[derive(Debug)]
pub(super) struct Turns {
    at_once: usize,
    all: Arc<Semaphore>,
    /// Those that have or ask for turns.
    tenants: Mutex<HashMap<TenantLabel, Weak<Semaphore>>>,
}

/// One turn. It ends with this value.
#[derive(Debug)]
pub(super) struct Turn {
    _of_all: OwnedSemaphorePermit,
    _own: Next,
}

/// A place among the next requests of its tenant.
#[derive(Debug)]
pub(super) struct Next {
    all: Arc<Semaphore>,
    _own: OwnedSemaphorePermit,
}

impl Next {
    /// Waits for a turn, in the order of asking.
    pub(super) async fn turn(self) -> Turn {
        let of_all = self.all.clone().acquire_owned().await.expect("nothing closes it");
        Turn { _of_all: of_all, _own: self }
    }
}

impl Turns {
    pub(super) fn new(at_once: usize) -> Self {
        Self::of(at_once, Arc::new(Semaphore::new(at_once)))
    }

    /// Turns that are taken out of `all`, of which each tenant asks for `at_once`.
    pub(super) fn of(at_once: usize, all: Arc<Semaphore>) -> Self {
        Self { at_once, all, tenants: Mutex::default() }
    }

    /// Waits for others of the tenant, in the order of asking.
    pub(super) async fn next(&self, tenant: TenantLabel) -> Next {
        let own = self.own(tenant).acquire_owned().await.expect("nothing closes it");
        Next { all: self.all.clone(), _own: own }
    }

    /// Waits for a turn, in the order of asking within a tenant.
    pub(super) async fn turn(&self, tenant: TenantLabel) -> Turn {
        self.next(tenant).await.turn().await
    }

    fn own(&self, tenant: TenantLabel) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock();
        tenants.retain(|_, own| own.strong_count() > 0);
        if let Some(own) = tenants.get(&tenant).and_then(Weak::upgrade) {
            return own;
        }
        let own = Arc::new(Semaphore::new(self.at_once));
        tenants.insert(tenant, Arc::downgrade(&own));
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use std::pin::pin;

    const A: TenantLabel = TenantLabel(1);
    const B: TenantLabel = TenantLabel(2);

    #[tokio::test]
    async fn a_tenant_waits_for_few_of_another() {
        let turns = Turns::new(2);
        let running = [turns.turn(A).await, turns.turn(A).await];
        let mut third = pin!(turns.turn(A));
        let mut fourth = pin!(turns.turn(A));
        assert!(third.as_mut().now_or_never().is_none() && fourth.as_mut().now_or_never().is_none());
        let mut other = pin!(turns.turn(B));
        assert!(other.as_mut().now_or_never().is_none(), "two run");
        let [first, second] = running;
        drop(first);
        assert!(third.as_mut().now_or_never().is_none(), "who came later comes before");
        let other = other.as_mut().now_or_never().unwrap();
        drop(second);
        let third = third.as_mut().now_or_never().unwrap();
        assert!(fourth.as_mut().now_or_never().is_none());
        drop((other, third));
        drop(fourth.as_mut().now_or_never().unwrap());
    }

    #[tokio::test]
    async fn tenants_without_turns_are_forgotten() {
        let turns = Turns::new(1);
        for tenant in 0..100 {
            drop(turns.turn(TenantLabel(tenant)).await);
        }
        assert_eq!(turns.tenants.lock().len(), 1);
    }
}
