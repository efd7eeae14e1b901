//! Parses specs: `random:hidden=600,layers=3,...`

use super::RandomModel;
use crate::formats::{ModelShape, Rope, RopeScaling, WeightsError};
use std::collections::BTreeMap;

/// Most parameters: 64 GiB as f32, far above any useful size.
const PARAMETERS_MAX: u64 = 1 << 34;

const KEYS: &str = "hidden, layers, heads, kv_heads, head_dim, ffn, vocab, context, theta, tied, seed";

struct Pairs<'a> {
    spec: &'a str,
    values: BTreeMap<&'a str, &'a str>,
}

impl<'a> Pairs<'a> {
    fn split(spec: &'a str) -> Result<Self, WeightsError> {
        let refuse = |why: String| WeightsError::Spec(format!("`{spec}`: {why}"));
        let body =
            spec.strip_prefix(RandomModel::PREFIX).ok_or_else(|| refuse("a spec starts with `random:`".into()))?;
        let mut values = BTreeMap::new();
        for pair in body.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| refuse(format!("`{pair}` is no key=value")))?;
            if !KEYS.split(", ").any(|known| known == key) {
                return Err(refuse(format!("unknown key `{key}`; there are {KEYS}")));
            }
            if values.insert(key, value).is_some() {
                return Err(refuse(format!("`{key}` is given twice")));
            }
        }
        Ok(Self { spec, values })
    }

    fn get<T: std::str::FromStr>(&self, key: &str, kind: &str, default: T) -> Result<T, WeightsError> {
        let Some(value) = self.values.get(key) else { return Ok(default) };
        value.parse().map_err(|_| WeightsError::Spec(format!("`{}`: {key}={value} is no {kind}", self.spec)))
    }

    fn size(&self, key: &str, default: usize) -> Result<usize, WeightsError> {
        self.get(key, "whole number", default)
    }
}

/// Shape and seed of a spec.
pub(super) fn parse(spec: &str) -> Result<(ModelShape, u64), WeightsError> {
    let pairs = Pairs::split(spec)?;
    let refuse = |why: String| WeightsError::Spec(format!("`{spec}`: {why}"));
    let (hidden, heads) = (pairs.size("hidden", 64)?, pairs.size("heads", 4)?);
    let head_dim = match pairs.values.get("head_dim") {
        Some(_) => pairs.size("head_dim", 0)?,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(refuse(format!("hidden={hidden} does not divide by heads={heads}; give head_dim"))),
    };
    let shape = ModelShape {
        vocab: pairs.size("vocab", 300)?,
        hidden,
        layers: pairs.size("layers", 2)?,
        heads,
        kv_heads: pairs.size("kv_heads", heads)?,
        head_dim,
        ffn: pairs.size("ffn", hidden.saturating_mul(2))?,
        context: pairs.size("context", 1024)?,
        rms_eps: 1e-5,
        rope: Rope { theta: pairs.get("theta", "number", 10_000.0)?, scaling: RopeScaling::None },
        tied: pairs.get("tied", "true or false", false)?,
    };
    shape.check().map_err(refuse)?;
    let parameters = shape.parameters();
    if parameters > PARAMETERS_MAX {
        return Err(refuse(format!("{parameters} parameters; at most {PARAMETERS_MAX} are possible")));
    }
    Ok((shape, pairs.get("seed", "whole number", 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_defaults() {
        let (shape, seed) = parse("random:").unwrap();
        assert_eq!((shape.hidden, shape.head_dim, shape.kv_heads, shape.ffn, seed), (64, 16, 4, 128, 0));
        let spec = "random:hidden=600,layers=3,heads=6,kv_heads=2,ffn=800,vocab=500,context=2048,seed=7,head_dim=64,\
                    theta=5e5,tied=true";
        let (shape, seed) = parse(spec).unwrap();
        let rope = Rope { theta: 5e5, scaling: RopeScaling::None };
        let (vocab, hidden, layers, heads, kv_heads, head_dim) = (500, 600, 3, 6, 2, 64);
        let (ffn, context, rms_eps, tied) = (800, 2048, 1e-5, true);
        let expected =
            ModelShape { vocab, hidden, layers, heads, kv_heads, head_dim, ffn, context, rms_eps, rope, tied };
        assert_eq!((shape, seed), (expected, 7));
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        let check = |spec: &str, part: &str| {
            let message = parse(spec).unwrap_err().to_string();
            assert!(message.contains(spec) && message.contains(part), "{message}");
        };
        check("rnd:", "starts with");
        check("random:hidden", "no key=value");
        check("random:width=3", "unknown key `width`");
        check("random:seed=1,seed=2", "`seed` is given twice");
        check("random:layers=two", "layers=two is no whole number");
        check("random:tied=1", "tied=1 is no true or false");
        check("random:layers=-1", "layers=-1");
        check("random:layers=0", "layers is 0");
        check("random:vocab=99999999999", "vocab is 99999999999");
        check("random:hidden=64,heads=5", "give head_dim");
        check("random:heads=0", "give head_dim");
        check("random:heads=4,kv_heads=3", "do not divide among 3");
        check("random:head_dim=15", "needs it even");
        check("random:theta=0", "theta is 0");
        check("random:theta=NaN", "theta is NaN");
        check("random:hidden=2000000,heads=1,head_dim=2,ffn=2000000,layers=1", "parameters; at most 17179869184");
        check("random:layers=2000000,hidden=2000000,ffn=2000000,heads=1,head_dim=2", "parameters; at most");
    }
}
