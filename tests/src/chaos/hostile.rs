//! An attacker without key and certificate. It sends garbage to every port of the cluster, stops in the middle of a message, and replays
//! what others sent. It excuses no failure.

use super::network::Network;
use super::stage::{Node, Stage};
use crate::processes::listening;
use baton_proto::v1::GenerateRequest;
use baton_proto::v1::inference_client::InferenceClient;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tonic::transport::Endpoint;

/// Concurrent attackers.
const AT_ONCE: u64 = 3;
/// Pause of an attacker between two attacks.
const REST: Duration = Duration::from_millis(60);
/// Longest wait for a connection, and for the answer to garbage.
const CONNECT_MAX: Duration = Duration::from_millis(500);
const ANSWER_MAX: Duration = Duration::from_millis(200);
/// How long an attack that stops in the middle of a message keeps its connection open.
const HOLD: Duration = Duration::from_secs(2);
/// Most bytes of one attack.
const BYTES_MAX: usize = 1 << 16;
/// How long to record a client's messages.
const LISTEN_MAX: Duration = Duration::from_secs(1);

/// The kinds of attacks on a port.
#[derive(Clone, Copy, Debug)]
enum Attack {
    /// Random bytes.
    Garbage,
    /// Garbage after the HTTP/2 preface.
    Http2,
    /// Garbage after the beginning of a TLS handshake.
    Tls,
    /// A length for which no host has memory, and few bytes after it.
    Length,
    /// Recorded bytes of a client or process, sent to any port.
    Replay,
    /// The same with one bit flipped.
    AlmostReplay,
    /// The beginning of recorded bytes, and then nothing.
    Half,
}

const ATTACKS: [Attack; 7] =
    [Attack::Garbage, Attack::Http2, Attack::Tls, Attack::Length, Attack::Replay, Attack::AlmostReplay, Attack::Half];

/// Attacks until it is dropped.
pub struct Hostile {
    said: Arc<AtomicU64>,
    ports: Arc<Mutex<Vec<SocketAddr>>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Hostile {
    /// Starts it. `request` is the client request that it records.
    pub(super) async fn start(stage: &Stage, request: GenerateRequest, seed: u64) -> anyhow::Result<Self> {
        let (said, ports) = (Arc::<AtomicU64>::default(), Arc::<Mutex<Vec<SocketAddr>>>::default());
        let heard: Arc<[u8]> = overheard(request).await?.into();
        let network = stage.shared_network();
        let task = |number: u64| {
            let random = StdRng::seed_from_u64(seed ^ (number << 32));
            tokio::spawn(attack(ports.clone(), heard.clone(), network.clone(), said.clone(), random))
        };
        let tasks = (0..AT_ONCE).map(task).collect();
        let hostile = Self { said, ports, tasks };
        hostile.look(stage).await;
        Ok(hostile)
    }

    /// Updates the cluster's addresses; restarted processes may listen elsewhere.
    pub async fn look(&self, stage: &Stage) {
        let mut found: Vec<SocketAddr> = stage.etcd.lock().await.addresses().iter().flat_map(|a| a.parse()).collect();
        for node in Node::ALL {
            let pid = stage.service(node).lock().await.pid();
            let reachable = |at: &SocketAddr| stage.network().is_none() || !at.ip().is_loopback();
            found.extend(listening(pid).unwrap_or_default().into_iter().filter(reachable));
        }
        *self.ports.lock() = found;
    }

    /// Attacks so far that reached a port.
    pub fn said(&self) -> u64 {
        self.said.load(Ordering::Relaxed)
    }

    /// Known ports.
    pub fn ports(&self) -> usize {
        self.ports.lock().len()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn attack(
    ports: Arc<Mutex<Vec<SocketAddr>>>,
    heard: Arc<[u8]>,
    network: Option<Arc<Network>>,
    said: Arc<AtomicU64>,
    mut random: StdRng,
) {
    loop {
        sleep(REST).await;
        let Some(port) = ports.lock().choose(&mut random).copied() else { continue };
        let attack = *ATTACKS.choose(&mut random).expect("there are some");
        let passed = network.as_ref().and_then(|network| network.overheard(&mut random));
        let bytes = bytes(attack, passed.as_deref().unwrap_or(&heard), &mut random);
        let hold = if let Attack::Half = attack { HOLD } else { ANSWER_MAX };
        said.fetch_add(u64::from(say(port, &bytes, hold).await), Ordering::Relaxed);
    }
}

/// The bytes of an attack.
fn bytes(attack: Attack, heard: &[u8], random: &mut StdRng) -> Vec<u8> {
    let mut garbage = |len: usize| -> Vec<u8> { (0..len).map(|_| random.random()).collect() };
    let mut said = match attack {
        Attack::Garbage => garbage(1 << 10),
        Attack::Http2 => [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"[..], &garbage(200)].concat(),
        // A handshake of TLS 1.x with a length.
        Attack::Tls => [&[0x16, 3, 1, 2, 0, 1][..], &garbage(600)].concat(),
        Attack::Length => [&[0xff; 16][..], &garbage(64)].concat(),
        Attack::Replay | Attack::AlmostReplay => heard.to_vec(),
        Attack::Half => heard[..heard.len() / 2].to_vec(),
    };
    if let (Attack::AlmostReplay, false) = (attack, said.is_empty()) {
        let at = random.random_range(0..said.len());
        said[at] ^= 1 << random.random_range(0..8);
    }
    said.truncate(BYTES_MAX);
    said
}

/// Sends the bytes. Returns whether all of them were sent.
async fn say(to: SocketAddr, bytes: &[u8], hold: Duration) -> bool {
    let Ok(Ok(mut stream)) = timeout(CONNECT_MAX, TcpStream::connect(to)).await else { return false };
    let said = timeout(CONNECT_MAX, stream.write_all(bytes)).await;
    let mut answer = Vec::new();
    // The answer does not matter: what counts is how the cluster behaves afterwards.
    let _ = timeout(hold, stream.read_to_end(&mut answer)).await;
    matches!(said, Ok(Ok(())))
}

/// All bytes that a client sends for this request, recorded from the network.
async fn overheard(request: GenerateRequest) -> anyhow::Result<Vec<u8>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let client = Endpoint::from_shared(format!("http://{}", listener.local_addr()?))?.connect_lazy();
    let call = tokio::spawn(async move { InferenceClient::new(client).generate(request).await.map(|_| ()) });
    let (mut stream, _) = listener.accept().await?;
    // The client sends the rest once it has received settings.
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await?;
    let mut heard = Vec::new();
    let _ = timeout(LISTEN_MAX, stream.read_to_end(&mut heard)).await;
    call.abort();
    anyhow::ensure!(!heard.is_empty(), "the client says nothing");
    Ok(heard)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_client_says_is_heard() {
        let heard = overheard(GenerateRequest { model: "told".into(), ..GenerateRequest::default() }).await.unwrap();
        assert!(heard.starts_with(b"PRI * HTTP/2.0") && heard.windows(4).any(|w| w == b"told"), "{heard:?}");
    }
}
