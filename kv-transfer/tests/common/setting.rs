//! What the instances of a test have in common: their authority, and where their pools are.

use super::authority::Authority;
use baton_kv_transfer::Credentials;
use baton_memory::{HostPool, PoolMemory, RemoteConfig, RemotePool};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

thread_local! {
    static CREDENTIALS: RefCell<Option<Arc<dyn Credentials>>> = const { RefCell::new(None) };
}

/// Runs a test whose instances, all made on this thread, are workers of one authority and speak in TLS.
pub fn in_tls(test: impl FnOnce()) {
    CREDENTIALS.set(Some(Authority::new().worker()));
    test();
    CREDENTIALS.set(None);
}

/// Where the pool of an instance is.
#[derive(Clone, Debug)]
pub enum Memory {
    Host,
    Remote,
    Given(Arc<dyn PoolMemory>),
}

impl Memory {
    pub fn allocate(self, bytes: usize) -> Arc<dyn PoolMemory> {
        match self {
            Self::Host => HostPool::new(bytes).unwrap(),
            Self::Remote => RemotePool::new(bytes, RemoteConfig::default()).unwrap(),
            Self::Given(memory) => memory,
        }
    }
}

thread_local! {
    /// Where the pool of the instance of this name is.
    static MEMORY: Cell<fn(&str) -> Memory> = const { Cell::new(host) };
}

/// Runs a test whose instances, all made on this thread, have their pools where `memory` says for their names.
pub fn in_memory(memory: fn(&str) -> Memory, test: impl FnOnce()) {
    MEMORY.set(memory);
    test();
    MEMORY.set(host);
}

fn host(_: &str) -> Memory {
    Memory::Host
}

/// All pools are remote.
pub fn remote(_: &str) -> Memory {
    Memory::Remote
}

/// Sources (`p`) have remote pools, and sinks pools of the host.
pub fn mixed(name: &str) -> Memory {
    if name.starts_with('p') { Memory::Remote } else { Memory::Host }
}

/// Whether it is such a test that runs in TLS.
pub fn is_in_tls() -> bool {
    CREDENTIALS.with_borrow(Option::is_some)
}

/// The credentials of the next instance.
pub fn credentials() -> Option<Arc<dyn Credentials>> {
    CREDENTIALS.with_borrow(Clone::clone)
}

/// Where the pool of the next instance is, if it has this name.
pub fn memory_of(name: &str) -> Memory {
    MEMORY.get()(name)
}
