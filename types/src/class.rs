//! What two instances must have in common before they exchange KV.

use crate::{Dtype, KvLayout};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A 256-bit content digest (BLAKE3 unless stated otherwise).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Parses 64 hexadecimal digits.
    pub fn from_hex(hex: &str) -> Option<Self> {
        if hex.len() != 64 || !hex.is_ascii() {
            return None;
        }
        let mut out = [0; 32];
        for (i, byte) in out.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
        }
        Some(Self(out))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;
    fn try_from(hex: String) -> Result<Self, Self::Error> {
        Self::from_hex(&hex).ok_or("a digest is 64 hexadecimal digits")
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// Format in which weights enter the GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum WeightFormat {
    /// Rounded to this element type.
    Elements(Dtype),
    /// As the model's file stores them.
    Stored,
}

impl WeightFormat {
    /// The name used in records and refusals.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Elements(dtype) => dtype.name(),
            Self::Stored => "stored",
        }
    }

    /// The inverse of [`WeightFormat::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        if name == Self::Stored.name() { Some(Self::Stored) } else { Dtype::from_name(name).map(Self::Elements) }
    }
}

impl From<Dtype> for WeightFormat {
    fn from(dtype: Dtype) -> Self {
        Self::Elements(dtype)
    }
}

impl From<WeightFormat> for String {
    fn from(format: WeightFormat) -> Self {
        format.name().to_owned()
    }
}

impl TryFrom<String> for WeightFormat {
    type Error = &'static str;
    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::from_name(&name).ok_or("no format of weights")
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Everything that decides the bits of a result, apart from model, prompt, parameters and seed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NumericsClass {
    /// Name of the written order of arithmetic, e.g. `f32fma`. Instructions and vector width are not part of it: they change no bit.
    pub order: String,
    /// Format in which weights enter the GEMMs.
    pub weights: WeightFormat,
    /// Element type of KV.
    pub kv: Dtype,
    /// Bumped whenever a kernel's reduction order changes.
    pub kernel_revision: u32,
}

impl fmt::Display for NumericsClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/w-{}/kv-{}/r{}", self.order, self.weights, self.kv, self.kernel_revision)
    }
}

/// The compatibility fingerprint of one instance.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compatibility {
    /// Digest over the model's configuration and weights.
    pub model: Digest,
    /// Groups and planes; block sizes may differ between peers.
    pub layout: KvLayout,
    pub class: NumericsClass,
}

/// Why two instances cannot exchange KV: both sides of the first difference.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} differs: this side has {ours}, the peer has {theirs}")]
pub struct Mismatch {
    pub what: &'static str,
    /// Value on this side.
    pub ours: String,
    /// Value of the peer.
    pub theirs: String,
}

impl Compatibility {
    /// Compares with a peer. Block sizes are not compared: copies are split at the boundaries of the finer block size.
    pub fn check(&self, peer: &Self) -> Result<(), Mismatch> {
        compare([&self.model, &peer.model], [&self.class, &peer.class], [&self.layout, &peer.layout])
    }
}

/// The first difference of two sides, ours first.
pub(crate) fn compare(
    models: [&Digest; 2],
    classes: [&NumericsClass; 2],
    layouts: [&KvLayout; 2],
) -> Result<(), Mismatch> {
    if models[0] != models[1] {
        return Err(Mismatch::new("model fingerprint", &models[0], &models[1]));
    }
    if classes[0] != classes[1] {
        return Err(Mismatch::new("numerics class", &classes[0], &classes[1]));
    }
    if layouts[0].groups() != layouts[1].groups() {
        return Err(Mismatch::new("KV layout", &layouts[0], &layouts[1]));
    }
    Ok(())
}

impl Mismatch {
    pub(crate) fn new(what: &'static str, ours: &dyn fmt::Display, theirs: &dyn fmt::Display) -> Self {
        Self { what, ours: ours.to_string(), theirs: theirs.to_string() }
    }
}
