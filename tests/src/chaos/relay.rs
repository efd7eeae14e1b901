//! A device in the hub that delays, drops or damages packets: what netem does, which not every kernel has.

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom as _;
use rand::{Rng as _, SeedableRng as _};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_tun::Tun;

/// Most packets held at once; more are dropped, as in any full queue.
const HELD_MAX: usize = 20_000;
/// Most recent payloads kept.
const PASSED_MAX: usize = 64;
/// The same as on every other link.
const MTU: usize = 1500;
/// Offset in an IPv4 header of the second byte of the destination, which is the network's number.
const NET_BYTE: usize = 17;

/// How packets are treated.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Impairment {
    /// Delay of a packet.
    pub delay: Duration,
    /// Share of packets that are lost.
    pub loss: f64,
    /// Share of packets with a TCP payload of which one byte is changed. Their checksum is corrected, so only the receiving program can
    /// notice.
    pub damage: f64,
}

/// The running relay. Ends when dropped.
pub struct Relay {
    impairments: Arc<Mutex<BTreeMap<u8, Impairment>>>,
    /// Most recent TCP payloads.
    passed: Arc<Mutex<VecDeque<Vec<u8>>>>,
    task: JoinHandle<()>,
}

impl Relay {
    /// Creates the device and reads packets from it.
    pub async fn start(device: &str, seed: u64) -> anyhow::Result<Self> {
        let tun = Tun::builder().name(device).mtu(MTU as i32).up().build()?.remove(0);
        let impairments = Arc::<Mutex<BTreeMap<u8, Impairment>>>::default();
        let passed = Arc::<Mutex<VecDeque<Vec<u8>>>>::default();
        let random = StdRng::seed_from_u64(seed);
        let task = tokio::spawn(carry(tun, impairments.clone(), passed.clone(), random));
        Ok(Self { impairments, passed, task })
    }

    /// One of the most recent TCP payloads, if there are any.
    pub fn overheard(&self, random: &mut StdRng) -> Option<Vec<u8>> {
        self.passed.lock().iter().choose(random).cloned()
    }

    /// Sets how packets of this network are treated from now on.
    pub fn set(&self, net: u8, impairment: Impairment) {
        self.impairments.lock().insert(net, impairment);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Packets by departure time, then in order of arrival.
type Held = BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>;

async fn carry(
    tun: Tun,
    impairments: Arc<Mutex<BTreeMap<u8, Impairment>>>,
    passed: Arc<Mutex<VecDeque<Vec<u8>>>>,
    mut random: StdRng,
) {
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
                let impairment = impairments.lock().get(&net).copied().unwrap_or_default();
                if held.len() < HELD_MAX && !random.random_bool(impairment.loss) {
                    number += 1;
                    let mut packet = buffer[..length].to_vec();
                    if let Some(payload) = payload(&packet).filter(|payload| !payload.is_empty()) {
                        let mut passed = passed.lock();
                        passed.push_back(packet[payload].to_vec());
                        let over = passed.len().saturating_sub(PASSED_MAX);
                        passed.drain(..over);
                    }
                    if random.random_bool(impairment.damage) {
                        damage(&mut packet, &mut random);
                    }
                    held.push(Reverse((Instant::now() + impairment.delay, number, packet)));
                }
            }
        }
    }
}

/// Offset of a packet's TCP header; the first byte of the IPv4 header has that header's length, in words of 4 bytes.
fn tcp_header(packet: &[u8]) -> usize {
    packet.first().map_or(0, |first| usize::from(first & 0xf) * 4)
}

/// Range of a packet's TCP payload; `None` for other packets.
fn payload(packet: &[u8]) -> Option<Range<usize>> {
    /// Offset of the protocol in an IPv4 header, and TCP's number.
    const TCP: (usize, u8) = (9, 6);
    /// Offset of the length in a TCP header: in words of 4 bytes, in the upper half of the byte.
    const LENGTH: usize = 12;
    let tcp = tcp_header(packet);
    let first = tcp + usize::from(packet.get(tcp + LENGTH)? >> 4) * 4;
    (*packet.get(TCP.0)? == TCP.1 && first <= packet.len()).then_some(first..packet.len())
}

/// Flips one bit of a packet's TCP payload, if it has any, and corrects its checksum (RFC 1624).
fn damage(packet: &mut [u8], random: &mut StdRng) {
    /// Offset of the checksum in a TCP header.
    const CHECKSUM: usize = 16;
    let tcp = tcp_header(packet);
    let Some(payload) = payload(packet).filter(|payload| !payload.is_empty()) else { return };
    let at = random.random_range(payload);
    // The 16-bit word that contains the byte; the last one is padded with zero.
    let word = tcp + (at - tcp) / 2 * 2;
    let read = |packet: &[u8], at: usize| u16::from_be_bytes([packet[at], packet.get(at + 1).copied().unwrap_or(0)]);
    let before = read(packet, word);
    packet[at] ^= 1 << random.random_range(0..8);
    let after = read(packet, word);
    let mut sum = u32::from(!read(packet, tcp + CHECKSUM)) + u32::from(!before) + u32::from(after);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    packet[tcp + CHECKSUM..tcp + CHECKSUM + 2].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The TCP checksum of a packet with its pseudo header: 0 if the packet's own checksum is correct.
    fn checksum(packet: &[u8]) -> u16 {
        let mut summed = packet[12..20].to_vec();
        summed.extend([0, 6]);
        summed.extend(((packet.len() - 20) as u16).to_be_bytes());
        summed.extend(&packet[20..]);
        let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        let mut sum: u32 = summed.chunks(2).map(word).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    /// A packet with a payload of this length, or without TCP.
    fn packet(payload: usize, protocol: u8) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 7, 7, 0, 0, 64, protocol, 0, 0, 10, 2, 1, 2, 10, 2, 3, 2];
        packet.extend([
            1, 2, 3, 4, 0, 0, 0, 9, 0, 0, 0, 5, 0x80, 0x18, 2, 0, 0, 0, 0, 0, 1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8,
        ]);
        packet.extend((0..payload).map(|i| (i * 37) as u8));
        let sum = checksum(&packet).to_be_bytes();
        packet[36..38].copy_from_slice(&sum);
        packet
    }

    #[test]
    fn one_bit_of_the_payload_is_another_and_the_checksum_fits() {
        let mut random = StdRng::seed_from_u64(3);
        for payload in (1..40).chain([1_399, 1_400]) {
            let before = packet(payload, 6);
            assert_eq!(checksum(&before), 0);
            let mut after = before.clone();
            damage(&mut after, &mut random);
            let bits = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
            assert_eq!((bits(&before[52..], &after[52..]), checksum(&after)), (1, 0), "{payload} bytes");
            assert_eq!((&before[..36], &before[38..52]), (&after[..36], &after[38..52]), "headers stay");
        }
        for kept in [packet(0, 6), packet(40, 17), Vec::new(), vec![0x45; 12]] {
            let mut after = kept.clone();
            damage(&mut after, &mut random);
            assert_eq!(kept, after);
        }
    }
}
