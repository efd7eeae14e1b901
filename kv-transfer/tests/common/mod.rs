//! Two instances in one process: pools that count their blocks, sinks that record what they are given, gates that hold phases.
#![allow(dead_code, unused_imports, missing_docs, unreachable_pub)] // Each test binary uses its part.

pub mod authority;
pub mod gate;
pub mod node;
pub mod parts;
pub mod pool;
pub mod process;
pub mod setting;
pub mod sink;
pub mod sockets;

use baton_kv_transfer::*;
use baton_types::*;
pub use gate::Gate;
pub use node::{Node, NodeConfig};
pub use pool::{Hold, Pool};
pub use setting::{Memory, in_memory, in_tls, is_in_tls, mixed, remote};
pub use sink::{Joint, Room, TestSink};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest wait for anything that must happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// UCX's puts on lanes that emulate them.
pub fn ucx_one_sided() -> TransportChoice {
    let (lanes, bind) = (UcxLanes::LoopbackTcp, [127, 0, 0, 1].into());
    TransportChoice::Ucx { lanes, bind, port: 0, devices: None, writes: UcxWrites::OneSided }
}

/// Sinks read what their sources would write, on lanes that emulate that.
pub fn ucx_read() -> TransportChoice {
    let (lanes, bind) = (UcxLanes::LoopbackTcp, [127, 0, 0, 1].into());
    TransportChoice::Ucx { lanes, bind, port: 0, devices: None, writes: UcxWrites::Read }
}

/// Waits until `done`; panics with `what` if that never comes.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn commit(tokens: u32) -> CommitPayload {
    CommitPayload { tokens: (0..=tokens).map(|t| t * 3).collect(), prompt_len: tokens, extra: b"extra".to_vec() }
}

/// A small layout of one group: 2 layers of k and v.
pub fn small(block_tokens: u32) -> KvLayout {
    KvLayout::llama(block_tokens, 2, 2, 24, Dtype::Bf16).unwrap()
}

/// A fence that tests open.
#[derive(Default)]
pub struct ManualFence(Mutex<Option<FenceStatus>>);

impl ManualFence {
    pub fn set(&self, status: FenceStatus) {
        *self.0.lock().unwrap() = Some(status);
    }
}

impl FencePoll for ManualFence {
    fn poll(&self) -> FenceStatus {
        self.0.lock().unwrap().unwrap_or(FenceStatus::Pending)
    }
}
