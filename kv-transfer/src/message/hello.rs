//! The greeting: the sender's identity, its KV layout, and the location of its region.

use super::{READS, TABLES};
use crate::wire::{Reader, WireError, Writer};
use crate::{HeadShard, Party};
use baton_types::{
    Compatibility, Digest, Dtype, GroupKind, Incarnation, InstanceId, KvGroup, KvLayout, KvPlane, KvPoolMap,
    NumericsClass, ProtocolRange, WeightFormat,
};

/// Location of a peer's region, in the peer's own address space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteRegion {
    pub address: u64,
    pub bytes: u64,
    /// Packed remote key; empty where the transport has none.
    pub key: Vec<u8>,
    /// The key is for reads alone: nobody may put by it.
    pub reads_only: bool,
    /// Its owner takes part in writes that their sink reads.
    pub takes_reads: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Protocol versions that the sender supports.
    pub protocol: ProtocolRange,
    /// Optional extensions that the sender supports; unknown bits are ignored.
    pub capabilities: u64,
    /// Extensions that the sender requires; unknown bits are refused.
    pub required: u64,
    pub party: Party,
    /// The peer that the sender expects.
    pub expects: Party,
    pub compatibility: Compatibility,
    /// Which part of the layout of `compatibility` the sender's pool holds.
    pub shard: HeadShard,
    /// Blocks of each group of the sender's pool.
    pub pool_blocks: Vec<u32>,
    pub region: RemoteRegion,
}

const TEXT_BYTES_MAX: usize = 256;
const KEY_BYTES_MAX: usize = 4096;

impl Hello {
    /// The sender's pool, if its size is possible.
    pub(crate) fn map(&self) -> Option<KvPoolMap> {
        let map =
            KvPoolMap::with_blocks(self.shard.part(&self.compatibility.layout)?, self.pool_blocks.clone()).ok()?;
        (map.bytes() as u64 <= self.region.bytes).then_some(map)
    }

    pub(super) fn write(&self, w: &mut Writer) {
        w.u32(self.protocol.min);
        w.u32(self.protocol.max);
        w.u64(self.capabilities);
        w.u64(self.required);
        write_party(w, &self.party);
        write_party(w, &self.expects);
        w.raw(&self.compatibility.model.0);
        write_class(w, &self.compatibility.class);
        write_layout(w, &self.compatibility.layout);
        w.u16(self.shard.index());
        w.u16(self.shard.of());
        // Peers without the capability read this number alone: 0, which they refuse, where groups differ.
        let (first, same) = (self.pool_blocks.first(), self.pool_blocks.windows(2).all(|pair| pair[0] == pair[1]));
        w.u32(first.copied().filter(|_| same).unwrap_or(0));
        w.u64(self.region.address);
        w.u64(self.region.bytes);
        let (key, reads_key): (&[u8], &[u8]) = match self.region.reads_only {
            true => (&[], &self.region.key),
            false => (&self.region.key, &[]),
        };
        w.bytes(key);
        if !same {
            w.u32s(self.pool_blocks.iter().copied());
        }
        if self.capabilities & READS > 0 {
            w.bytes(reads_key);
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, WireError> {
        let protocol = ProtocolRange { min: r.u32("protocol")?, max: r.u32("protocol")? };
        let (capabilities, required) = (r.u64("capabilities")?, r.u64("required extensions")?);
        let (party, expects) = (read_party(r)?, read_party(r)?);
        let model = Digest(r.raw(32, "model fingerprint")?.try_into().expect("32 bytes were taken"));
        let class = read_class(r)?;
        let layout = read_layout(r)?;
        let shard =
            HeadShard::try_new(r.u16("shard")?, r.u16("shard")?).ok_or(WireError::new("shard", "cannot exist"))?;
        let each = r.u32("pool size")?;
        let (address, bytes) = (r.u64("region")?, r.u64("region")?);
        let key = r.bytes(KEY_BYTES_MAX, "region key")?;
        let groups = layout.groups().len();
        let pool_blocks = match each {
            0 if capabilities & TABLES > 0 => r.u32s(groups, "pool sizes", |blocks| blocks)?,
            each => vec![each; groups],
        };
        let takes_reads = capabilities & READS > 0;
        let reads_key = if takes_reads { r.bytes(KEY_BYTES_MAX, "region key of reads")? } else { &[] };
        let reads_only = key.is_empty() && !reads_key.is_empty();
        let key = if reads_only { reads_key } else { key }.to_vec();
        let compatibility = Compatibility { model, layout, class };
        let region = RemoteRegion { address, bytes, key, reads_only, takes_reads };
        Ok(Self { protocol, capabilities, required, party, expects, compatibility, shard, pool_blocks, region })
    }
}

pub(super) fn write_party(w: &mut Writer, party: &Party) {
    w.text(party.instance.as_str());
    w.u64(party.incarnation.0);
}

pub(super) fn read_party(r: &mut Reader<'_>) -> Result<Party, WireError> {
    let name = r.text(InstanceId::BYTES_MAX, "instance")?;
    let instance = InstanceId::try_new(name).map_err(|_| WireError::new("instance", "is no name"))?;
    Ok(Party { instance, incarnation: Incarnation(r.u64("incarnation")?) })
}

fn write_class(w: &mut Writer, class: &NumericsClass) {
    w.text(&class.order);
    w.text(class.weights.name());
    w.text(class.kv.name());
    w.u32(class.kernel_revision);
}

fn read_dtype(r: &mut Reader<'_>) -> Result<Dtype, WireError> {
    Dtype::from_name(r.text(TEXT_BYTES_MAX, "dtype")?).ok_or(WireError::new("dtype", "is unknown"))
}

fn read_class(r: &mut Reader<'_>) -> Result<NumericsClass, WireError> {
    let order = r.text(TEXT_BYTES_MAX, "numerics class")?.to_owned();
    let weights = WeightFormat::from_name(r.text(TEXT_BYTES_MAX, "weights")?);
    let weights = weights.ok_or(WireError::new("weights", "are in an unknown format"))?;
    let kv = read_dtype(r)?;
    Ok(NumericsClass { order, weights, kv, kernel_revision: r.u32("kernel revision")? })
}

fn write_layout(w: &mut Writer, layout: &KvLayout) {
    w.u32(layout.block_tokens());
    w.list(layout.groups(), |w, group| {
        let (kind, window) = match group.kind {
            GroupKind::Full => (0, 0),
            GroupKind::Window(tokens) => (1, tokens),
            GroupKind::Latent => (2, 0),
            GroupKind::State => (3, 0),
        };
        w.u8(kind);
        w.u32(window);
        w.list(&group.layers, |w, layer| w.u32(*layer));
        w.list(&group.planes, |w, plane| {
            w.text(plane.name());
            w.u32(plane.heads());
            w.u32(plane.dim());
            w.text(plane.dtype().name());
        });
    });
}

fn read_layout(r: &mut Reader<'_>) -> Result<KvLayout, WireError> {
    let impossible = WireError::new("KV layout", "cannot exist");
    let block_tokens = r.u32("KV layout")?;
    let groups = r.list(8, 13, "KV groups", |r| {
        let kind = match (r.u8("group kind")?, r.u32("window")?) {
            (0, 0) => GroupKind::Full,
            (1, tokens) => GroupKind::Window(tokens),
            (2, 0) => GroupKind::Latent,
            (3, 0) => GroupKind::State,
            _ => return Err(WireError::new("group kind", "is unknown")),
        };
        let layers = r.list(4097, 4, "layers", |r| r.u32("layer"))?;
        let planes = r.list(8, 16, "planes", |r| {
            let name = r.text(TEXT_BYTES_MAX, "plane")?.to_owned();
            let (heads, dim) = (r.u32("heads")?, r.u32("dimension")?);
            KvPlane::try_new(name, heads, dim, read_dtype(r)?).map_err(|_| WireError::new("plane", "cannot exist"))
        })?;
        Ok(KvGroup { kind, layers, planes })
    })?;
    KvLayout::try_new(block_tokens, groups).map_err(|_| impossible)
}
