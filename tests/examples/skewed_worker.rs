//! A worker of another version, for images of `make test-k8s`: it stands under the name of the shipped binary and takes its flags.
//! TEST_SKEW says how it differs: `protocol`, it speaks a newer one too; `revision`, its kernels add in another order.

use anyhow::bail;
use baton_tests::skewed::{Skew, run};
use baton_types::{ProtocolRange, Role};

fn main() -> anyhow::Result<()> {
    let mut flags: Vec<String> = std::env::args().collect();
    let role = match flags.first().and_then(|name| name.rsplit('/').next()) {
        Some("baton-prefill-worker") => Role::Prefill,
        Some("baton-decode-worker") => Role::Decode,
        other => bail!("{other:?} is the name of no worker"),
    };
    let current = ProtocolRange::CURRENT;
    let newer = ProtocolRange { max: current.max + 1, ..current };
    let skew = match std::env::var("TEST_SKEW").as_deref() {
        Ok("protocol") => Skew::Protocol(newer),
        Ok("revision") => Skew::Revision,
        other => bail!("TEST_SKEW is {other:?}"),
    };
    flags[0] = "worker".into();
    run(role, skew, &flags)
}
