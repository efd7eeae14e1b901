//! Who is connected: greetings, and what they settle.

use super::pump::Pump;
use crate::message::{Hello, Message, PARTIAL_SINCE, RemoteRegion};
use crate::shard::Cut;
use crate::transport::ConnId;
use crate::{Greetings, HandoffFailure, HeadShard, Party, RefuseReason, TransferAddress, TransferConfig};
use baton_types::{KvPoolMap, Mismatch};
use std::time::Instant;

/// How far a connection is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// We connected and sent our hello; the welcome is due by then.
    Sent(Instant),
    /// They connected; their hello is due by then.
    Awaited(Instant),
    /// Settled. A mismatch refuses every handoff, in both directions, and keeps the connection for saying so.
    Done(Result<(), Mismatch>),
}

/// One connection.
pub(super) struct Connection {
    pub(super) greeting: Greeting,
    /// Who is there: expected until greeted, known afterwards.
    pub(super) party: Option<Party>,
    /// The peer showed a worker's certificate. Who of the workers it is, only its greeting says.
    pub(super) proven: bool,
    /// The protocol version spoken; 0 until greeted.
    pub(super) protocol: u32,
    /// Which of its shards.
    pub(super) shard: u16,
    /// How many legs a handoff of its instance has here, and one of ours there.
    pub(super) legs: (usize, usize),
    /// What moves from here to there, and from there to here; `None` where the two hold no heads in common.
    pub(super) cuts: Option<(Cut, Cut)>,
    /// The address it was opened to; `None` where the peer connected.
    pub(super) address: Option<TransferAddress>,
    /// It is being closed.
    pub(super) closing: bool,
    /// The peer's pool.
    pub(super) map: Option<KvPoolMap>,
    pub(super) pump: Pump,
    pub(super) lanes: String,
    /// When something was on it last.
    pub(super) used_at: Instant,
}

impl Connection {
    pub(super) fn new(greeting: Greeting, party: Option<Party>, shard: u16, config: &TransferConfig) -> Self {
        let pump = Pump::new(config.limits.in_flight_bytes_max);
        Self {
            greeting,
            party,
            proven: false,
            protocol: 0,
            shard,
            legs: (1, 1),
            cuts: None,
            address: None,
            closing: false,
            map: None,
            pump,
            lanes: String::new(),
            used_at: Instant::now(),
        }
    }

    /// Whether handoffs may be offered on it, or why none ever will.
    pub(super) fn usable(&self) -> Option<Result<(), HandoffFailure>> {
        match (&self.greeting, &self.party) {
            (Greeting::Done(Ok(())), _) => Some(Ok(())),
            (Greeting::Done(Err(mismatch)), Some(peer)) => {
                Some(Err(HandoffFailure::Incompatible { peer: peer.clone(), mismatch: mismatch.clone() }))
            }
            _ => None,
        }
    }

    /// Whether what is moved may begin behind position 0.
    pub(super) fn moves_parts(&self) -> bool {
        self.protocol >= PARTIAL_SINCE
    }

    /// What the peer's greeting settles about shards.
    pub(super) fn meet(&mut self, config: &TransferConfig, theirs: HeadShard) {
        let (ours, whole) = (config.shard, &config.compatibility.layout);
        self.shard = theirs.index();
        self.legs = (ours.partners(theirs.of()).len(), theirs.partners(ours.of()).len());
        self.cuts = Cut::new(whole, ours, theirs).zip(Cut::new(whole, theirs, ours));
    }

    /// When the greeting is overdue.
    pub(super) fn greet_by(&self) -> Option<Instant> {
        match self.greeting {
            Greeting::Sent(by) | Greeting::Awaited(by) => Some(by),
            Greeting::Done(_) => None,
        }
    }
}

/// Our own greeting to `expects`.
pub(super) fn hello(config: &TransferConfig, region: RemoteRegion, expects: Party) -> Box<Hello> {
    Box::new(Hello {
        protocol: config.protocol,
        capabilities: 0,
        required: 0,
        party: config.party.clone(),
        expects,
        compatibility: config.compatibility.clone(),
        shard: config.shard,
        pool_blocks: config.map.blocks(),
        region,
    })
}

/// Why a peer cannot be talked to.
pub(super) struct Unwelcome {
    pub(super) reason: RefuseReason,
    /// For our own log.
    pub(super) detail: String,
    /// For a peer that has proven nothing: no name, no incarnation, no fingerprint.
    pub(super) told: String,
}

/// Whether a peer that greets like this can be talked to at all.
pub(super) fn check_hello(config: &TransferConfig, hello: &Hello) -> Result<KvPoolMap, Unwelcome> {
    let unwelcome = |reason, told: String| {
        let detail = format!("{told}: {} greets {}, this is {}", hello.party, hello.expects, config.party);
        Err(Unwelcome { reason, detail, told })
    };
    if config.protocol.common(hello.protocol).is_none() {
        let told = format!("the peer speaks protocols {}, this instance {}", hello.protocol, config.protocol);
        return unwelcome(RefuseReason::Protocol, told);
    }
    if hello.required != 0 {
        return unwelcome(RefuseReason::Protocol, format!("unknown required extensions {:#x}", hello.required));
    }
    if hello.expects != config.party && config.hooks.greetings() != Greetings::AnyIncarnation {
        return unwelcome(RefuseReason::WrongIncarnation, "another instance, or another start of it, is here".into());
    }
    match hello.map() {
        Some(map) => Ok(map),
        None => unwelcome(RefuseReason::Protocol, "the peer's pool does not fit its region".into()),
    }
}

/// A message as text, for logs: its kind, never its contents.
pub(super) fn kind_of(message: &Message) -> &'static str {
    match message {
        Message::Hello(_) => "hello",
        Message::Welcome(_) => "welcome",
        Message::Reject { .. } => "reject",
        Message::Offer(_) => "offer",
        Message::Grant { .. } => "grant",
        Message::Refuse { .. } => "refuse",
        Message::Checksums { .. } => "checksums",
        Message::Commit(_) => "commit",
        Message::Ack { .. } => "ack",
        Message::Nack { .. } => "nack",
        Message::Abort { .. } => "abort",
        Message::Aborted { .. } => "aborted",
        Message::Ask { .. } => "ask",
        Message::Confirm { .. } => "confirm",
        Message::Held { .. } => "held",
        Message::NotHeld { .. } => "not held",
        Message::Unpin { .. } => "unpin",
    }
}

/// Where a connection is kept.
pub(super) type Connections = std::collections::BTreeMap<ConnId, Connection>;
