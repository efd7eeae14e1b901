//! A chat of many turns in the terminal. The whole conversation is sent with each message.

use super::{GenerateArgs, Message, Prompt, print, tell_timings};
use crate::router::RouterChannel;
use anyhow::Context;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::IsTerminal as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::spawn_blocking;

/// What the user did at the prompt.
enum Input {
    Line(String),
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D, or the end of a file.
    End,
}

/// Chats until the user ends it.
pub(super) async fn run(args: &GenerateArgs, channel: RouterChannel) -> anyhow::Result<()> {
    let mut interrupts = signal(SignalKind::interrupt()).context("cannot wait for Ctrl-C")?;
    let mut editor = DefaultEditor::new().context("cannot read from the terminal")?;
    if std::io::stdin().is_terminal() {
        eprintln!("Ctrl-C stops an answer, Ctrl-D ends the chat.");
    }
    let mut messages = args.first_messages();
    loop {
        let (same, input) = read(editor, &mut interrupts).await?;
        editor = same;
        match input {
            Input::End => return Ok(()),
            Input::Interrupt => eprintln!("Ctrl-D ends the chat."),
            Input::Line(line) if line.trim().is_empty() => {}
            Input::Line(line) => {
                // What cannot be kept is only missing among the lines that the arrow keys bring back.
                let _ = editor.add_history_entry(&line);
                messages.push(Message { role: "user", content: line });
                turn(args, channel.clone(), &mut messages, &mut interrupts).await;
            }
        }
    }
}

/// The next line. The editor blocks its thread, and comes back with what it read.
async fn read(mut editor: DefaultEditor, interrupts: &mut Signal) -> anyhow::Result<(DefaultEditor, Input)> {
    let reading = spawn_blocking(move || {
        let line = editor.readline("> ");
        (editor, line)
    });
    let (editor, line) = tokio::select! {
        read = reading => read.context("the terminal cannot be read")?,
        // The editor takes Ctrl-C as a key: this one was sent to a process that reads no terminal.
        _ = interrupts.recv() => anyhow::bail!("interrupted"),
    };
    let input = match line {
        Ok(line) => Input::Line(line),
        Err(ReadlineError::Interrupted) => Input::Interrupt,
        Err(ReadlineError::Eof) => Input::End,
        Err(error) => return Err(error).context("the terminal cannot be read"),
    };
    Ok((editor, input))
}

/// One answer. What was stopped stays in the conversation, a message that failed does not.
async fn turn(args: &GenerateArgs, channel: RouterChannel, messages: &mut Vec<Message>, interrupts: &mut Signal) {
    let mut text = String::new();
    let answered = tokio::select! {
        answered = print(args, Prompt::Chat(messages.clone()), channel, &mut text) => Some(answered),
        _ = interrupts.recv() => None,
    };
    match answered {
        Some(Ok(printed)) => tell_timings(&printed),
        Some(Err(error)) => {
            eprintln!("baton: {error:#}");
            messages.pop();
            return;
        }
        None => println!("\n[stopped]"),
    }
    messages.push(Message { role: "assistant", content: text });
}
