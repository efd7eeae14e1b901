//! Bringing UCX up: its settings, the front worker, the registered region.

use super::{Sleeper, Ucx, lanes};
use crate::message::RemoteRegion;
use crate::transport::Wake;
use crate::ucx::{Context, Memory, Status, Worker, devices_at};
use crate::{Fencing, Region, TransferConfig, TransferError, UcxWrites};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Segments of TCP lanes. In UCX's own of 8 KiB, puts over loopback have a third of the rate and twice the processor time.
pub(crate) const TCP_SEGMENTS: [(&str, &str); 2] = [("TCP_TX_SEG_SIZE", "256k"), ("TCP_RX_SEG_SIZE", "256k")];

impl Ucx {
    pub(crate) fn start(
        tls: &str,
        bind: IpAddr,
        devices: Option<&str>,
        writes: UcxWrites,
        config: &TransferConfig,
        region: Arc<Region>,
    ) -> Result<(Self, Wake), TransferError> {
        let devices = devices.map_or_else(|| devices_at(bind), |given| Ok(given.to_owned()));
        let devices = devices.map_err(|why| TransferError::Config(format!("cannot bind UCX to {bind}: {why}")))?;
        let failed = |what: &str, why: String| TransferError::Transport {
            transport: "ucx",
            detail: format!("{what} with UCX_TLS={tls} UCX_NET_DEVICES={devices}: {why}"),
        };
        let ucx = |what: &'static str| move |e: Status| failed(what, e.to_string());
        let io = |what: &'static str| move |e: std::io::Error| failed(what, e.to_string());
        let keepalive = format!("{}ms", (config.limits.peer_silent_ms / 4).max(1));
        // A device may have addresses of both families, of which UCX listens at one.
        let family = if bind.is_ipv4() { "inet" } else { "inet6" };
        let settings = [
            ("TLS", tls),
            ("NET_DEVICES", &devices),
            ("TCP_AF_PRIO", family),
            ("KEEPALIVE_INTERVAL", &keepalive),
            // Else the progress thread itself waits for a peer that answers no connection, and every other peer with it.
            ("TCP_CONN_NB", "y"),
            // Its older protocols abort the process where a message cannot be sent to a peer that is gone (`ucp_request_try_send`).
            ("PROTO_ENABLE", "y"),
        ];
        let context = Context::new(&[&settings[..], &TCP_SEGMENTS].concat()).map_err(ucx("no context"))?;
        let sleeper = Sleeper::new().map_err(io("no wake-up"))?;
        let waker = sleeper.waker().map_err(io("no wake-up"))?;
        let events = sleeper.events().map_err(io("no wake-up"))?;
        let front = Worker::new(&context, events.clone(), None).map_err(ucx("no worker"))?;
        let base = region.address();
        let bytes = region.len() as u64;
        let memory = Memory::register(&context, region.clone()).map_err(ucx("cannot register the region"))?;
        let key = memory.key().map_err(ucx("no key"))?;
        let address = front.address().map_err(ucx("no address"))?;
        let (fencing, transports) = (config.hooks.fencing(), context.transports());
        if !lanes::reach_others(&transports) {
            return Err(failed("no lane to any other process", "start again once the network device is up".into()));
        }
        let fences = lanes::fences(&transports) && fencing != Fencing::Never;
        if !fences {
            tracing::warn!(?transports, "lost peers cannot be fenced on every lane; their blocks stay quarantined");
        }
        let transport = Self {
            address,
            remote: RemoteRegion { address: base, bytes, key },
            uid: rand::random(),
            next: 0,
            connections_max: 2 * config.limits.peers_max,
            silent_max: Duration::from_millis(config.limits.peer_silent_ms),
            fences,
            fencing,
            writes,
            operations: HashMap::new(),
            names: HashSet::new(),
            connections: BTreeMap::new(),
            unfenced: Vec::new(),
            memory: Some(memory),
            region,
            front,
            context,
            sleeper,
            events,
        };
        Ok((transport, Box::new(move || waker.wake().expect("an eventfd takes a wake-up at any time"))))
    }
}
