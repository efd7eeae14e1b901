//! Starts UCX: its settings, the control channel, the registered memory.

use super::connection::Connections;
use super::data_path::{DataPath, Opened};
use super::{Ucx, lanes};
use crate::hazards::hazard;
use crate::message::RemoteRegion;
use crate::pool_turns::SharedPoolMemory;
use crate::transport::Wake;
use crate::transport::rotation::Rotation;
use crate::transport::tcp::{Listen, Tcp};
use crate::ucx::{Context, Domain, KeyHead, Memory, Status};
use crate::{TransferConfig, TransferError, UcxLanes, UcxWrites};
use baton_memory::PoolMemory;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Segment sizes of TCP lanes. With UCX's default of 8 KiB, puts over loopback have a third of the rate and twice the processor time.
pub(crate) const TCP_SEGMENTS: [(&str, &str); 2] = [("TCP_TX_SEG_SIZE", "256k"), ("TCP_RX_SEG_SIZE", "256k")];

/// UCX's name of its TCP transport, which stores what any client writes to any address.
const TCP: &str = "tcp";

/// Parameters for starting UCX, besides the configuration of the service.
pub(crate) struct Start<'a> {
    pub(crate) lanes: &'a UcxLanes,
    pub(crate) listen: Listen,
    pub(crate) devices: Option<&'a str>,
    pub(crate) writes: UcxWrites,
}

impl Ucx {
    pub(crate) fn start(
        Start { lanes: chosen, listen, devices, writes }: Start<'_>,
        config: &TransferConfig,
        shared: Arc<SharedPoolMemory>,
    ) -> Result<(Self, Wake), TransferError> {
        let over_tcp = *chosen == UcxLanes::LoopbackTcp;
        if over_tcp && !listen.bind.is_loopback() {
            let why = "UCX over TCP stores whatever anybody writes: it is for tests, on loopback only";
            return Err(TransferError::Config(why.into()));
        }
        let tls = chosen.tls_for(shared.memory.kind());
        let devices = if over_tcp { "lo" } else { devices.unwrap_or("all") };
        let failed = |what: &str, why: String| TransferError::Transport {
            transport: "ucx",
            detail: format!("{what} with UCX_TLS={tls} UCX_NET_DEVICES={devices}: {why}"),
        };
        let ucx = |what: &'static str| move |e: Status| failed(what, e.to_string());
        let keepalive = format!("{}ms", (config.limits.peer_silent_ms / 4).max(1));
        // The device has addresses of both families; UCX listens on one of them.
        let family = if listen.bind.is_ipv4() { "inet" } else { "inet6" };
        let settings = [
            ("TLS", tls),
            ("NET_DEVICES", devices),
            ("TCP_AF_PRIO", family),
            ("KEEPALIVE_INTERVAL", &keepalive),
            // Otherwise the progress thread would block on a peer that does not answer, and with it every other peer.
            ("TCP_CONN_NB", "y"),
            // Its older protocols abort the process when a message cannot be sent to a peer that is gone (`ucp_request_try_send`).
            ("PROTO_ENABLE", "y"),
            // Endpoints require it, and shared memory provides it only with this setting.
            ("MM_ERROR_HANDLING", "y"),
        ];
        let no_lanes = |opened| TransferError::NoLanes { tls: tls.into(), devices: devices.into(), opened };
        let context = Context::new(&[&settings[..], &TCP_SEGMENTS].concat()).map_err(|error| match error {
            // Also where all that it found are copies within this process.
            Status::NO_DEVICE => no_lanes(Vec::new()),
            error => ucx("no context")(error),
        })?;
        let transports = context.transports();
        // Before there is a worker, because workers open sockets. The check uses the transports that UCX resolves, not the spelling of the
        // names.
        if !over_tcp && transports.iter().any(|transport| transport == TCP) {
            let why = format!(
                "UCX_TLS={tls} has TCP among its lanes, over which UCX stores whatever anybody writes: name others, or take transfer.transport = \"tcp\""
            );
            return Err(TransferError::Config(why));
        }
        if !lanes::reach_others(&transports) {
            return Err(no_lanes(transports));
        }
        let unknown = lanes::unknown(&transports);
        if !unknown.is_empty() {
            return Err(TransferError::UnknownLanes { tls: tls.into(), unknown });
        }
        let (mut path, memory) = register(&context, &shared.memory).map_err(ucx("cannot register the pool"))?;
        if writes == UcxWrites::Read && memory.is_some() {
            path = DataPath::Gets;
        }
        let fences = lanes::fences(&transports, path) && !hazard!(config, NoFences);
        if !fences {
            tracing::warn!(?transports, "lost peers cannot be fenced on every lane; their blocks stay quarantined");
        }
        let (channel, wake) = Tcp::start(listen, config, shared)?;
        let pool = channel.pool().clone();
        let events = channel.epoll().map_err(|e| failed("no wake-up", e.to_string()))?;
        // If the pool is not registered, peers get no key and send messages.
        let mut remote = RemoteRegion { bytes: pool.bytes() as u64, takes_reads: true, ..RemoteRegion::default() };
        if let Some(memory) = &memory {
            (remote.address, remote.key) = (memory.address(), memory.key().map_err(ucx("no key"))?);
            remote.reads_only = path == DataPath::Gets;
        }
        let transport = Self {
            remote,
            path,
            fences,
            #[cfg(any(test, feature = "testing"))]
            hazards: config.hazards.clone(),
            copies_run_on: lanes::have_cuda_ipc(&transports),
            writes,
            operations: HashMap::new(),
            due: Vec::new(),
            connections: Connections::default(),
            rotation: Rotation::default(),
            draining: Vec::new(),
            unfenced: Vec::new(),
            memory,
            pool,
            context,
            events: Rc::new(events),
            channel,
        };
        Ok((transport, wake))
    }
}

/// Registers the pool where its path needs that. A GPU's is registered first, since only then it shows which NICs take it.
fn register(context: &Rc<Context>, pool: &Arc<dyn PoolMemory>) -> Result<(DataPath, Option<Rc<Memory>>), Status> {
    let (kind, reachable) = (pool.kind(), pool.dma_address().is_some());
    let supported = context.supports(kind);
    let domains = context.domains();
    let opened = |took: &dyn Fn(usize) -> bool| {
        let of = |(at, domain): (usize, &Domain)| {
            let (name, took_pool) = (domain.name.clone(), took(at));
            let transports = domain.resources.iter().map(|resource| resource.transport.clone());
            transports.map(|transport| Opened { transport, domain: name.clone(), took_pool }).collect::<Vec<_>>()
        };
        domains.iter().enumerate().flat_map(of).collect::<Vec<_>>()
    };
    let (intended, _) = DataPath::of(kind, reachable, supported, &opened(&|_| true));
    let is_host = intended == DataPath::ByLanes;
    if !intended.registers() {
        let (path, why) = DataPath::of(kind, reachable, supported, &opened(&|_| false));
        if let Some(why) = why {
            tracing::info!(pool = %kind, "KV of the GPU is staged in memory of the host: {why}");
        }
        return Ok((path, None));
    }
    let registered = Memory::register(context, pool.clone());
    let memory = match registered {
        Err(error) if is_host => return Err(error),
        // UCX fails where one of the NICs does.
        Err(error) => {
            tracing::debug!(%error, "UCX does not register memory of the GPU");
            None
        }
        Ok(memory) => Some(memory),
    };
    let head = memory.as_ref().map(|memory| memory.key()).transpose()?.as_deref().and_then(KeyHead::of);
    // A key that says another type has another beginning than this version knows.
    let head = head.filter(|head| head.is_of_host() == is_host);
    let (path, why) =
        DataPath::of(kind, reachable, supported, &opened(&|domain| head.is_some_and(|head| head.took(domain))));
    if let Some(why) = why {
        tracing::warn!(pool = %kind, "KV of the GPU is staged in memory of the host, not moved by NICs: {why}");
    }
    Ok((path, memory.filter(|_| path.registers())))
}
