//! A device in the hub that holds packets back or drops them: what netem does, which not every kernel has.

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_tun::Tun;

/// Most packets held at once; more are dropped, as by any full queue.
const HELD_MAX: usize = 20_000;
/// As on every other link.
const MTU: usize = 1500;
/// Where an IPv4 header has the second byte of the destination, which numbers the network.
const NET_BYTE: usize = 17;

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Manner {
    /// It comes so late.
    pub delay: Duration,
    /// Share that never comes.
    pub loss: f64,
}

/// The running relay. Ends when dropped.
pub struct Relay {
    manners: Arc<Mutex<BTreeMap<u8, Manner>>>,
    task: JoinHandle<()>,
}

impl Relay {
    /// Makes the device and takes packets from it.
    pub async fn start(device: &str, seed: u64) -> anyhow::Result<Self> {
        let tun = Tun::builder().name(device).mtu(MTU as i32).up().build()?.remove(0);
        let manners = Arc::<Mutex<BTreeMap<u8, Manner>>>::default();
        let random = StdRng::seed_from_u64(seed);
        Ok(Self { task: tokio::spawn(carry(tun, manners.clone(), random)), manners })
    }

    /// How packets within this network fare from now on.
    pub fn set(&self, net: u8, manner: Manner) {
        self.manners.lock().insert(net, manner);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Packets by when they leave, and in order of arrival.
type Held = BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>;

async fn carry(tun: Tun, manners: Arc<Mutex<BTreeMap<u8, Manner>>>, mut random: StdRng) {
    let (mut held, mut buffer, mut number) = (Held::new(), [0; MTU], 0);
    loop {
        let due = held.peek().map(|Reverse((due, ..))| *due);
        tokio::select! {
            biased;
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                if let Some(Reverse((_, _, packet))) = held.pop() {
                    // A packet that the kernel refuses is lost, as on any network.
                    let _ = tun.send(&packet).await;
                }
            }
            received = tun.recv(&mut buffer) => {
                let Ok(length) = received else { return };
                let net = buffer[..length].get(NET_BYTE).copied().unwrap_or_default();
                let manner = manners.lock().get(&net).copied().unwrap_or_default();
                if held.len() < HELD_MAX && !random.random_bool(manner.loss) {
                    number += 1;
                    held.push(Reverse((Instant::now() + manner.delay, number, buffer[..length].to_vec())));
                }
            }
        }
    }
}
