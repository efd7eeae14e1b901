//! One configuration tree per process, one loader: defaults, then a TOML file, then `BATON_*` variables, then flags.
//!
//! Each binary defines its tree as a plain serde struct with `#[serde(deny_unknown_fields, default)]` that embeds the
//! sections of this crate ([`crate::telemetry::TelemetryConfig`], [`crate::grpc::GrpcConfig`],
//! [`crate::admin::AdminConfig`], [`crate::membership::embedded::JoinConfig`] or
//! [`crate::membership::embedded::LeaseConfig`], [`crate::DrainConfig`]) under the names `telemetry`, `grpc`, `admin`,
//! `membership` and `drain`, and implements [`Check`]. Unknown keys, values of the wrong type and values out of range
//! are errors that name the key and the layer it came from.
//!
//! Variables: `telemetry.otlp_url` is `BATON_TELEMETRY__OTLP_URL` (two underscores between levels); an empty one counts
//! as unset. `BATON_CONFIG` names the file if `--config` does not. Limits end in `_max`, units come last: `lease_ms`,
//! `kv_cache_bytes`.

mod args;
mod check;
mod error;
mod layer;
mod values;

#[cfg(test)]
mod tests;

pub use args::{CommonArgs, Overlay};
pub use check::{Check, Checker};
pub use error::ConfigError;
pub use values::{ByteSize, Secret, list};

use figment::Figment;
use figment::providers::Serialized;
use layer::Layer;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::PathBuf;

/// Prefix of all configuration variables.
pub const ENV_PREFIX: &str = "BATON_";

/// The layers over the defaults, lowest first.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    /// TOML file, if there is one.
    pub file: Option<PathBuf>,
    /// All variables of the process, or those of a test; other prefixes are ignored.
    pub env: Vec<(String, String)>,
    pub flags: Overlay,
}

impl Layers {
    /// The layers of this process.
    pub fn of_process(args: &CommonArgs, flags: Overlay) -> Self {
        // Lossy conversion is correct here: a variable of ours that is not UTF-8 then fails as an unknown key or a
        // wrong value.
        let env =
            std::env::vars_os().map(|(k, v)| (k.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()));
        let env: Vec<_> = env.filter(|(name, _)| name.starts_with(ENV_PREFIX)).collect();
        let from_env = env.iter().find(|(name, value)| name == layer::FILE_VARIABLE && !value.is_empty());
        let file = args.config.clone().or_else(|| from_env.map(|(_, value)| value.into()));
        Self { file, env, flags }
    }

    /// Merges the layers over the defaults and checks the result.
    pub fn load<C: Check + Serialize + DeserializeOwned + Default>(self) -> Result<C, ConfigError> {
        let mut figment = Figment::from(Serialized::defaults(C::default()));
        if let Some(path) = self.file {
            figment = figment.merge(Layer::file(path)?);
        }
        figment = figment.merge(Layer::env(&self.env)?).merge(Layer::from(self.flags));
        // Lossy: variables are text, so "8" is a number where one is expected.
        let config: C = figment.extract_lossy().map_err(ConfigError::from)?;
        let mut checker = Checker::default();
        config.check(&mut checker);
        match checker.into_problems() {
            problems if problems.is_empty() => Ok(config),
            problems => Err(ConfigError::out_of_range(problems, |key| layer::origin(&figment, key))),
        }
    }
}

/// Loads the configuration of this process. With `--dump-config` it prints it and returns `None`; the process should
/// then end.
pub fn load_or_dump<C>(args: &CommonArgs, flags: Overlay) -> Result<Option<C>, ConfigError>
where
    C: Check + Serialize + DeserializeOwned + Default,
{
    let config: C = Layers::of_process(args, flags).load()?;
    if args.dump_config {
        print!("{}", dump(&config)?);
        return Ok(None);
    }
    Ok(Some(config))
}

/// The effective configuration as TOML, secrets masked: [`Secret`]s, and the user part of URLs.
pub fn dump<C: Serialize>(config: &C) -> Result<String, ConfigError> {
    let mut tree = toml::Value::try_from(config).map_err(|e| ConfigError::Dump(e.to_string()))?;
    values::mask_urls(&mut tree);
    toml::to_string_pretty(&tree).map_err(|e| ConfigError::Dump(e.to_string()))
}
