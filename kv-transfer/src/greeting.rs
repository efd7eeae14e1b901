//! The greeting: what two services declare about themselves, and the terms that follow for their connection.

use crate::hazards::hazard;
use crate::heads::Cut;
use crate::message::{DEVICE_REASONS, Hello, PARTIAL_SINCE, READS, RemoteRegion, STATES, TABLES};
use crate::plan::check_from;
use crate::{HandoffFailure, Party, RefuseReason, TransferConfig};
use baton_types::{GroupKind, KvPoolMap, Mismatch, seeded};

/// Terms that a greeting settled.
#[derive(Debug)]
pub(crate) struct Terms {
    /// A mismatch refuses every handoff in both directions. The connection stays open to report it.
    compatible: Result<(), Mismatch>,
    /// Why the layout cannot be moved, likewise.
    movable: Result<(), &'static str>,
    pub(crate) party: Party,
    /// Protocol version in use.
    pub(crate) protocol: u32,
    /// Optional extensions that the peer supports.
    pub(crate) capabilities: u64,
    /// Index of the peer's shard.
    pub(crate) shard: u16,
    /// Number of shards of the peer's instance that put a part of each sequence into this shard.
    pub(crate) legs_here: u16,
    /// Number of this instance's shards that put a part into the peer's shard.
    pub(crate) legs_there: u16,
    /// What moves from this side to the peer; `None` where the two share no heads.
    pub(crate) outward: Option<Cut>,
    /// What moves from the peer to this side, likewise.
    pub(crate) inward: Option<Cut>,
    pub(crate) map: KvPoolMap,
}

impl Terms {
    pub(crate) fn new(config: &TransferConfig, theirs: &Hello, map: KvPoolMap) -> Self {
        let (ours, whole) = (config.shard, &config.compatibility.layout);
        let compatible = match hazard!(config, AnyFingerprint) {
            true => Ok(()),
            false => config.compatibility.check(&theirs.compatibility),
        };
        let partners = |range: std::ops::Range<u16>| range.end - range.start;
        let has = |of: fn(GroupKind) -> bool| whole.groups().iter().any(|group| of(group.kind));
        let has_states = has(|kind| kind == GroupKind::State);
        let movable = if has_states && theirs.capabilities & STATES == 0 {
            Err("the layout has states, which the peer does not move")
        } else if has(|kind| matches!(kind, GroupKind::Window(_))) && theirs.capabilities & TABLES == 0 {
            Err("the layout has windows, and the peer takes only tables that begin with position 0")
        } else {
            Ok(())
        };
        Self {
            compatible,
            movable,
            party: theirs.party.clone(),
            protocol: config.protocol.common(theirs.protocol).unwrap_or_default(),
            capabilities: theirs.capabilities,
            shard: theirs.shard.index(),
            legs_here: partners(ours.partners(theirs.shard.of())),
            legs_there: partners(theirs.shard.partners(ours.of())),
            outward: Cut::new(whole, ours, theirs.shard),
            inward: Cut::new(whole, theirs.shard, ours),
            map,
        }
    }

    /// Fails if this connection cannot carry any handoff.
    pub(crate) fn check(&self) -> Result<(), HandoffFailure> {
        let incompatible = |mismatch| HandoffFailure::Incompatible { peer: self.party.clone(), mismatch };
        self.compatible.clone().map_err(incompatible)?;
        self.movable.map_err(|detail| HandoffFailure::Protocol(detail.into()))
    }

    /// Whether a transfer may begin after position 0.
    pub(crate) fn moves_parts(&self) -> bool {
        self.protocol >= PARTIAL_SINCE
    }

    /// Checks that the peer can take or give `moved` positions from `from` on.
    pub(crate) fn check_part(&self, from: u32, moved: u32) -> Result<(), String> {
        if from == 0 {
            return Ok(());
        }
        if !self.moves_parts() {
            return Err(format!("version {} of the protocol has no parts", self.protocol));
        }
        check_from(&self.map, from, from + moved).map_err(|detail| format!("at the peer, {detail}"))
    }
}

/// Our own greeting to `expects`.
pub(crate) fn hello(config: &TransferConfig, region: RemoteRegion, expects: Party) -> Box<Hello> {
    Box::new(Hello {
        protocol: config.protocol,
        capabilities: TABLES | DEVICE_REASONS | READS | STATES,
        required: 0,
        party: config.party.clone(),
        expects,
        compatibility: config.compatibility.clone(),
        shard: config.shard,
        pool_blocks: config.map.group_blocks().to_vec(),
        region,
    })
}

/// Why this side refuses a peer.
pub(crate) struct Unwelcome {
    pub(crate) reason: RefuseReason,
    /// For our own log.
    pub(crate) detail: String,
    /// For a peer that has proven nothing: without names, incarnations or fingerprints.
    pub(crate) told: String,
}

/// Checks that this side can talk to the peer that sent this greeting. Returns the peer's pool.
pub(crate) fn check_hello(config: &TransferConfig, hello: &Hello) -> Result<KvPoolMap, Unwelcome> {
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
    if hello.expects != config.party && !hazard!(config, AnyIncarnation) && !seeded!(OtherIncarnation) {
        return unwelcome(RefuseReason::WrongIncarnation, "another instance, or another start of it, is here".into());
    }
    match hello.map() {
        Some(map) => Ok(map),
        None => unwelcome(RefuseReason::Protocol, "the peer's pool does not fit its region".into()),
    }
}
