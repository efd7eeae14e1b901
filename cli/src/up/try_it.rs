//! The commands printed for a first try. They work as printed, and show no secret: a key comes from the variable that `baton` itself reads.

use super::Addresses;
use baton_node::environment::API_KEY_VARIABLE;
use baton_node::identity::CA_FILE;
use std::path::{Path, absolute};

/// The commands for a cluster whose client ports take TLS by the folder `tls`, if there is one.
pub(super) fn commands(program: &str, addresses: &Addresses, tls: Option<&Path>, has_keys: bool) -> String {
    let Addresses { grpc, http, .. } = addresses;
    let scheme = if tls.is_some() { "https" } else { "http" };
    // Absolute: the other terminal may be in another folder.
    let authority = tls.map(|folder| folder.join(CA_FILE)).filter(|file| file.exists());
    let authority = authority.map(|file| quoted(&absolute(&file).unwrap_or(file)));
    let (mut generate, mut curl) =
        (format!("{program} generate"), format!("curl {scheme}://{http}/v1/chat/completions"));
    if tls.is_some() || grpc.port() != 50051 {
        generate += &format!(" --server {scheme}://{grpc}");
    }
    if let Some(file) = &authority {
        generate += &format!(" --ca {file}");
        curl += &format!(" --cacert {file}");
    }
    let mut text = String::from("\nTry it from another terminal");
    if has_keys {
        text += &format!(" where {API_KEY_VARIABLE} is exported and holds a key");
        curl += &format!(" -H \"authorization: Bearer ${API_KEY_VARIABLE}\"");
    }
    text += ":\n";
    if tls.is_some() && authority.is_none() {
        text +=
            &format!("  (there is no {CA_FILE} beside the certificate: if this host does not trust its authority, ");
        text += "add --ca FILE to baton, --cacert FILE to curl)\n";
    }
    text += &format!("  {generate} \"What is the capital of France?\"\n");
    text += &format!("  {curl} -H 'content-type: application/json' \\\n");
    text += "    -d '{\"messages\":[{\"role\":\"user\",\"content\":\"What is the capital of France?\"}]}'\n";
    text
}

/// A path as one word of a shell.
pub(super) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-+:@%,=".contains(&byte));
    if is_plain { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(grpc: u16, tls: Option<&Path>, has_keys: bool) -> String {
        let at = |port| ([127, 0, 0, 1], port).into();
        let addresses = Addresses { grpc: at(grpc), http: at(8000), cluster: at(1) };
        commands("baton", &addresses, tls, has_keys)
    }

    #[test]
    fn an_open_cluster_needs_nothing_more() {
        let text = r#"
Try it from another terminal:
  baton generate "What is the capital of France?"
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \
    -d '{"messages":[{"role":"user","content":"What is the capital of France?"}]}'
"#;
        assert_eq!(told(50051, None, false), text);
        assert!(told(50061, None, false).contains(r#"generate --server http://127.0.0.1:50061 "What"#));
    }

    #[test]
    fn commands_name_the_authority_and_the_variable_of_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(CA_FILE);
        let unknown = told(50051, Some(folder.path()), false);
        assert!(unknown.contains("there is no ca.crt") && !unknown.contains("BATON_API_KEY"), "{unknown}");
        std::fs::write(&file, "").unwrap();
        let text = r#"
Try it from another terminal where BATON_API_KEY is exported and holds a key:
  baton generate --server https://127.0.0.1:50051 --ca FILE "What is the capital of France?"
  curl https://127.0.0.1:8000/v1/chat/completions --cacert FILE -H "authorization: Bearer $BATON_API_KEY" -H 'content-type: application/json' \
    -d '{"messages":[{"role":"user","content":"What is the capital of France?"}]}'
"#;
        assert_eq!(told(50051, Some(folder.path()), true).replace(&file.display().to_string(), "FILE"), text);
    }

    #[test]
    fn paths_are_one_word() {
        for (path, word) in [("/a/b-1.crt", "/a/b-1.crt"), ("/a b", "'/a b'"), ("/it's $1", r"'/it'\''s $1'")] {
            assert_eq!(quoted(Path::new(path)), word);
        }
    }
}
