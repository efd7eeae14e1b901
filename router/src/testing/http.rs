//! A minimal HTTP client: HTTP/1.0, so that bodies end with the connection and arrive as they are written.

use serde_json::Value;
use std::net::SocketAddr;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

/// An answer whose body is still to be read.
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    body: BufReader<TcpStream>,
}

/// Sends a request and reads the head of its answer.
pub(crate) async fn send(to: SocketAddr, line: &str, headers: &str, body: &str) -> Answer {
    let mut stream = TcpStream::connect(to).await.unwrap();
    let length = body.len();
    let head =
        format!("{line} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n");
    stream.write_all((head + body).as_bytes()).await.unwrap();
    let mut body = BufReader::new(stream);
    let mut line = String::new();
    body.read_line(&mut line).await.unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}")).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        line.clear();
        body.read_line(&mut line).await.unwrap();
        match line.trim().split_once(": ") {
            Some((name, value)) => headers.push((name.to_owned(), value.to_owned())),
            None => return Answer { status, headers, body },
        }
    }
}

/// A POST of JSON.
pub(crate) async fn post(to: SocketAddr, path: &str, body: &Value) -> Answer {
    send(to, &format!("POST {path}"), "", &body.to_string()).await
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// The rest of the body.
    pub(crate) async fn text(mut self) -> String {
        let mut text = String::new();
        self.body.read_to_string(&mut text).await.unwrap();
        text
    }

    pub(crate) async fn json(self) -> Value {
        serde_json::from_str(&self.text().await).unwrap()
    }

    /// The next line of an event stream that is not empty; `None` at its end.
    pub(crate) async fn line(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.body.read_line(&mut line).await.unwrap() == 0 {
                return None;
            }
            if !line.trim().is_empty() {
                return Some(line.trim().to_owned());
            }
        }
    }
}
