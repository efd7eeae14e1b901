//! `baton identity`: creates a certificate authority, and the credentials that each kind of process needs.

use anyhow::{Context, ensure};
use baton_node::identity::{Authority, Role};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Folder of certificates for servers that are not Baton processes.
const SERVER: &str = "server";

/// Arguments of `baton identity`.
#[derive(Args, Debug)]
pub(crate) struct IdentityArgs {
    /// Output folder. A process takes the subfolder of its role (`router`, `worker` or `operator`) as --identity. A second run renews the
    /// certificates.
    folder: PathBuf,
    /// Folder of the certificate authority, created if it is missing. Keep it outside the cluster. Default: `authority` in the output
    /// folder.
    #[arg(long, value_name = "FOLDER")]
    authority: Option<PathBuf>,
    /// Also trust the authorities in this file, while a new authority replaces an old one; see docs/security.md.
    #[arg(long, value_name = "FILE")]
    also_trust: Vec<PathBuf>,
    /// Also make a server certificate for this host name or address, e.g. for etcd, in the subfolder `server`.
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,
    /// Validity of the certificates in days. The authority is valid for ten years.
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u64).range(1..=3650))]
    days: u64,
}

/// Writes all files, and prints where each is.
pub(crate) fn run(args: &IdentityArgs) -> anyhow::Result<()> {
    let home = args.authority.clone().unwrap_or_else(|| args.folder.join("authority"));
    let authority = if home.exists() {
        Authority::load(&home)
            .with_context(|| format!("{} holds no authority that `baton identity` made", home.display()))?
    } else {
        let authority = Authority::new()?;
        authority.save(&home)?;
        println!("{}  a new authority: keep its key secret, it can sign any identity", home.display());
        authority
    };
    let mut also = String::new();
    for path in &args.also_trust {
        let pem = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(pem.contains("BEGIN CERTIFICATE"), "{} holds no certificate", path.display());
        also.push_str(&pem);
    }
    let lasts = Duration::from_secs(args.days * 24 * 3600);
    for role in Role::ALL {
        let dir = args.folder.join(role.name());
        authority.issue(&dir, &[role], &[], lasts, &also)?;
        println!("{}  for the role {role}, {} days", dir.display(), args.days);
    }
    if !args.host.is_empty() {
        let dir = args.folder.join(SERVER);
        authority.issue(&dir, &[], &args.host, lasts, &also)?;
        println!("{}  for {}, {} days", dir.display(), args.host.join(", "), args.days);
    }
    Ok(())
}
