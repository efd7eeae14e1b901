//! Records of instances and model cards. They come from workers over membership, so every list and text is bounded.

use super::ConvertError;
use super::error::{bounded, name, required, text};
use crate::v1;
use baton_types::{
    Digest, Dtype, InstanceRecord, KvLayout, ModelCard, NumericsClass, ProtocolRange, Role, Shard, WeightFormat, shown,
};
use std::collections::BTreeMap;
use std::ops::Range;

/// Longest name, label, pool or endpoint, in bytes.
pub const NAME_BYTES_MAX: usize = 256;
/// Most labels of one instance.
pub const LABELS_MAX: usize = 64;
/// Most names under which a model is served.
pub const SERVED_NAMES_MAX: usize = 64;
/// Most end tokens of a model.
pub const END_TOKENS_MAX: usize = 256;
/// Longest JSON of a KV layout: room for 4,096 layers in eight groups.
pub const LAYOUT_BYTES_MAX: usize = 64 << 10;
/// Most ranks of one instance.
pub const SHARDS_MAX: usize = 64;
/// Longest data-plane address; a UCX worker address with many lanes is some hundred bytes.
pub const ADDRESS_BYTES_MAX: usize = 16 << 10;
/// Most capabilities of one instance.
pub const CAPABILITIES_MAX: usize = 64;

fn names(field: &str, values: Vec<String>, max: usize) -> Result<Vec<String>, ConvertError> {
    bounded(field, values.len(), max, "names")?;
    values.into_iter().enumerate().map(|(i, value)| name(format!("{field}[{i}]"), value, NAME_BYTES_MAX)).collect()
}

pub(super) fn digest(field: &str, bytes: &[u8]) -> Result<Digest, ConvertError> {
    let bytes =
        bytes.try_into().map_err(|_| ConvertError::new(field, format!("must be 32 bytes, got {}", bytes.len())))?;
    Ok(Digest(bytes))
}

fn ordered(field: &str, range: Range<u32>) -> Result<Range<u32>, ConvertError> {
    if range.start >= range.end {
        return Err(ConvertError::new(field, format!("is the empty range {range:?}")));
    }
    Ok(range)
}

fn positive(field: &str, value: u32) -> Result<u32, ConvertError> {
    if value == 0 { Err(ConvertError::new(field, "must be at least 1")) } else { Ok(value) }
}

impl From<Role> for v1::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
        }
    }
}

fn role(code: i32) -> Result<Role, ConvertError> {
    match v1::Role::try_from(code) {
        Ok(v1::Role::Prefill) => Ok(Role::Prefill),
        Ok(v1::Role::Decode) => Ok(Role::Decode),
        Ok(v1::Role::Unspecified) => Err(ConvertError::missing("role")),
        Err(_) => Err(ConvertError::new("role", format!("has the unknown value {code}"))),
    }
}

impl From<NumericsClass> for v1::NumericsClass {
    fn from(c: NumericsClass) -> Self {
        Self {
            order: c.order,
            weights: c.weights.to_string(),
            kv: c.kv.to_string(),
            kernel_revision: c.kernel_revision,
        }
    }
}

impl TryFrom<v1::NumericsClass> for NumericsClass {
    type Error = ConvertError;

    fn try_from(c: v1::NumericsClass) -> Result<Self, ConvertError> {
        let unknown =
            |field, value: &str| ConvertError::new(field, format!("names an unknown element type {}", shown(value)));
        Ok(Self {
            weights: WeightFormat::from_name(&c.weights).ok_or_else(|| unknown("weights", &c.weights))?,
            kv: Dtype::from_name(&c.kv).ok_or_else(|| unknown("kv", &c.kv))?,
            order: name("order", c.order, NAME_BYTES_MAX)?,
            kernel_revision: c.kernel_revision,
        })
    }
}

impl From<ProtocolRange> for v1::ProtocolRange {
    fn from(r: ProtocolRange) -> Self {
        Self { min: r.min, max: r.max }
    }
}

impl TryFrom<v1::ProtocolRange> for ProtocolRange {
    type Error = ConvertError;

    fn try_from(r: v1::ProtocolRange) -> Result<Self, ConvertError> {
        if r.min == 0 || r.min > r.max {
            return Err(ConvertError::new("min", format!("must be 1 to max, got {} with max {}", r.min, r.max)));
        }
        Ok(Self { min: r.min, max: r.max })
    }
}

impl From<Shard> for v1::Shard {
    fn from(s: Shard) -> Self {
        Self {
            transfer_address: s.transfer_address.into(),
            layer_start: s.layers.start,
            layer_end: s.layers.end,
            kv_head_start: s.kv_heads.start,
            kv_head_end: s.kv_heads.end,
        }
    }
}

impl TryFrom<v1::Shard> for Shard {
    type Error = ConvertError;

    fn try_from(s: v1::Shard) -> Result<Self, ConvertError> {
        bounded("transfer_address", s.transfer_address.len(), ADDRESS_BYTES_MAX, "bytes")?;
        Ok(Self {
            transfer_address: s.transfer_address.into(),
            layers: ordered("layers", s.layer_start..s.layer_end)?,
            kv_heads: ordered("kv_heads", s.kv_head_start..s.kv_head_end)?,
        })
    }
}

impl From<ModelCard> for v1::ModelCard {
    fn from(c: ModelCard) -> Self {
        Self {
            id: c.id,
            served_names: c.served_names,
            revision: c.revision,
            fingerprint: c.fingerprint.0.to_vec().into(),
            context_max: c.context_max,
            vocab: c.vocab,
            end_tokens: c.end_tokens,
            defaults: Some(c.defaults.into()),
            bundle: c.bundle.map(|d| d.0.to_vec().into()).unwrap_or_default(),
        }
    }
}

impl TryFrom<v1::ModelCard> for ModelCard {
    type Error = ConvertError;

    fn try_from(c: v1::ModelCard) -> Result<Self, ConvertError> {
        bounded("end_tokens", c.end_tokens.len(), END_TOKENS_MAX, "tokens")?;
        Ok(Self {
            id: name("id", c.id, NAME_BYTES_MAX)?,
            served_names: names("served_names", c.served_names, SERVED_NAMES_MAX)?,
            revision: text("revision", c.revision, NAME_BYTES_MAX)?,
            fingerprint: digest("fingerprint", &c.fingerprint)?,
            context_max: positive("context_max", c.context_max)?,
            vocab: positive("vocab", c.vocab)?,
            end_tokens: c.end_tokens,
            defaults: required("defaults", Some(c.defaults.unwrap_or_default()))?,
            bundle: if c.bundle.is_empty() { None } else { Some(digest("bundle", &c.bundle)?) },
        })
    }
}

/// A card that its readers accept, or the reason why they would not: for a writer that wants to know before it publishes one.
pub fn checked_card(card: ModelCard) -> Result<ModelCard, ConvertError> {
    ModelCard::try_from(v1::ModelCard::from(card))
}

impl From<InstanceRecord> for v1::InstanceRecord {
    fn from(r: InstanceRecord) -> Self {
        Self {
            party: Some(r.party.into()),
            role: v1::Role::from(r.role) as i32,
            labels: r.labels.into_iter().collect(),
            pool: r.pool,
            endpoint: r.endpoint,
            card: Some(r.card.into()),
            protocol: Some(r.protocol.into()),
            // The layout has only strings, numbers and lists, so it always converts to JSON.
            layout: serde_json::to_string(&r.layout).unwrap_or_default(),
            class: Some(r.class.into()),
            capacity_tokens: r.capacity_tokens,
            running_max: r.running_max,
            shards: r.shards.into_iter().map(Into::into).collect(),
            capabilities: r.capabilities,
            waiting_max: r.waiting_max,
        }
    }
}

impl TryFrom<v1::InstanceRecord> for InstanceRecord {
    type Error = ConvertError;

    fn try_from(r: v1::InstanceRecord) -> Result<Self, ConvertError> {
        bounded("shards", r.shards.len(), SHARDS_MAX, "shards")?;
        if r.shards.is_empty() {
            return Err(ConvertError::missing("shards"));
        }
        let shard = |(i, s): (usize, v1::Shard)| Shard::try_from(s).map_err(|e| e.within(&format!("shards[{i}]")));
        Ok(Self {
            party: required("party", r.party)?,
            role: role(r.role)?,
            labels: labels(r.labels)?,
            pool: name("pool", r.pool, NAME_BYTES_MAX)?,
            endpoint: endpoint(r.endpoint)?,
            card: required("card", r.card)?,
            protocol: required("protocol", r.protocol)?,
            layout: layout(&r.layout)?,
            class: required("class", r.class)?,
            capacity_tokens: r.capacity_tokens,
            running_max: r.running_max,
            waiting_max: r.waiting_max,
            shards: r.shards.into_iter().enumerate().map(shard).collect::<Result<_, _>>()?,
            capabilities: names("capabilities", r.capabilities, CAPABILITIES_MAX)?,
        })
    }
}

fn labels(
    labels: impl IntoIterator<Item = (String, String), IntoIter: ExactSizeIterator>,
) -> Result<BTreeMap<String, String>, ConvertError> {
    let labels = labels.into_iter();
    bounded("labels", labels.len(), LABELS_MAX, "labels")?;
    labels
        .map(|(key, value)| Ok((name("labels", key, NAME_BYTES_MAX)?, text("labels", value, NAME_BYTES_MAX)?)))
        .collect()
}

fn endpoint(value: String) -> Result<String, ConvertError> {
    let value = name("endpoint", value, NAME_BYTES_MAX)?;
    let port = value.rsplit_once(':').and_then(|(host, port)| (!host.is_empty()).then_some(port)?.parse::<u16>().ok());
    if port.is_none_or(|port| port == 0) {
        return Err(ConvertError::new("endpoint", format!("must be host:port, got {value:?}")));
    }
    Ok(value)
}

fn layout(json: &str) -> Result<KvLayout, ConvertError> {
    bounded("layout", json.len(), LAYOUT_BYTES_MAX, "bytes")?;
    serde_json::from_str(json).map_err(|e| ConvertError::invalid("layout", e))
}
