//! A test authority, and certificates that it signs.

use std::io;
use std::path::Path;
use std::process::Command;

/// Writes an authority `ca.pem` and a certificate `node.pem` of 127.0.0.1 signed by it, with `node.key`, into `folder`.
/// Needs `openssl`; an error contains its output.
pub fn certificates(folder: &Path) -> io::Result<()> {
    std::fs::write(folder.join("san"), "subjectAltName=IP:127.0.0.1\n")?;
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    for arguments in [
        format!("req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca"),
        format!("req {key} -keyout node.key -out node.csr -subj /CN=node"),
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile san -out node.pem".into(),
    ] {
        let output = Command::new("openssl").args(arguments.split(' ')).current_dir(folder).output()?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
    }
    Ok(())
}
