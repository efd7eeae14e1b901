//! The KV that two doctors move: that of one prompt on a model of common size.

use anyhow::Context;
use baton_kv_transfer::{Moved, TransferAddress, TransportChoice, Trial, UcxLanes, UcxWrites};
use baton_types::{Dtype, InstanceId, KvLayout, KvPoolMap};
use std::net::IpAddr;

/// Tokens of one handoff: 128 MiB with the layout below.
pub(super) const TOKENS: u32 = 1_024;
/// Tokens of a block.
const BLOCK_TOKENS: u32 = 16;
/// Blocks of a pool: handoffs use every other one.
pub(super) const BLOCKS: u32 = 2 * TOKENS / BLOCK_TOKENS;
/// Largest pool that the other side may request: 512 MiB.
pub(super) const BLOCKS_MAX: u32 = 2 * BLOCKS;
/// A description of the KV.
pub(super) const WHAT: &str = "1,024 tokens of Llama-3-8B";

/// A service at `bind`, with a pool of `blocks` blocks of Llama-3-8B's KV: 32 layers, 8 heads of 128, bf16. The KV goes over these lanes
/// of UCX and `devices`, or over TCP if there are none.
pub(super) fn start(
    name: &str,
    bind: IpAddr,
    tls: Option<String>,
    devices: Option<String>,
    blocks: u32,
) -> anyhow::Result<Trial> {
    let map = KvPoolMap::try_new(KvLayout::llama(BLOCK_TOKENS, 32, 8, 128, Dtype::Bf16)?, blocks)?;
    let transport = match tls.map(UcxLanes::Named) {
        Some(lanes) => TransportChoice::Ucx { lanes, bind, port: 0, devices, writes: UcxWrites::ByLanes },
        None => TransportChoice::tcp(bind),
    };
    Ok(Trial::start(Trial::config(InstanceId::try_new(name)?, transport, map))?)
}

/// Address of the service, as text.
pub(super) fn to_text(address: &TransferAddress) -> String {
    hex::encode(address.to_bytes())
}

/// The inverse of [`to_text`].
pub(super) fn from_text(text: &str) -> anyhow::Result<TransferAddress> {
    Ok(TransferAddress::from_bytes(&hex::decode(text).context("the other side's address is not in hex")?)?)
}

/// Hands off to the service `name` at `address` this many times; the first handoff, which connects, does not count.
pub(super) fn rounds(
    mut trial: Trial,
    name: &str,
    address: TransferAddress,
    count: usize,
) -> anyhow::Result<Vec<Moved>> {
    let peer = Trial::peer(InstanceId::try_new(name)?, address);
    trial.hand_off(&peer)?;
    let moved = (0..count).map(|_| trial.hand_off(&peer)).collect::<Result<_, _>>()?;
    trial.stop();
    Ok(moved)
}
