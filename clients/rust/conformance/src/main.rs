//! The Rust client driven by the harness: see `clients/conformance/README.md` for the protocol.

mod calls;
mod generate;
mod options;

use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::time::Instant;

use dragoman::{Client, Config, Error};
use serde_json::{Value, json};

/// One observation, seen by the harness at once.
fn emit(line: Value) {
    let mut out = io::stdout().lock();
    // A harness that is gone reads nothing; the next instruction will not come.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// One observation of a call.
fn emit_of(call: usize, event: &str, mut line: Value) {
    line["call"] = json!(call);
    line["event"] = json!(event);
    emit(line);
}

fn emit_error(call: usize, error: &Error, began: Instant) {
    let line = json!({
        "reason": error.reason.to_string(),
        "message": error.message,
        "retryable": error.retryable(),
        "retry_delay_seconds": error.retry_delay.map(|delay| delay.as_secs_f64()),
        "metadata": error.metadata,
        "http_status": error.http_status(),
        "grpc_code": error.grpc_code() as i32,
        "seconds": began.elapsed().as_secs_f64(),
    });
    emit_of(call, "error", line);
}

/// One call with its one end.
async fn play(client: &Client, index: usize, call: &Value) {
    let began = Instant::now();
    let ended = match call["do"].as_str().unwrap_or_default() {
        "generate" => generate::generate(client, index, call).await,
        what => match calls::value_of(client, what, call).await {
            Some(Ok(value)) => {
                emit_of(index, "value", json!({"value": value}));
                Ok(())
            }
            Some(Err(error)) => Err(error),
            None => {
                emit(json!({"event": "unsupported", "what": what}));
                Ok(())
            }
        },
    };
    if let Err(error) = ended {
        emit_error(index, &error, began);
    }
}

/// One instruction, with a client of its own.
async fn run(instruction: &Value) -> Result<(), Error> {
    let client = Client::new(Config {
        controller: options::text(&instruction["controller"]),
        agent: options::text(&instruction["agent"]),
        tenant: options::text(&instruction["tenant"]).unwrap_or_default(),
        tls: options::tls(&instruction["tls"]),
        retry: options::retry(&instruction["retry"]),
    })?;
    for (index, call) in instruction["calls"].as_array().into_iter().flatten().enumerate() {
        play(&client, index, call).await;
    }
    client.close().await;
    emit(json!({"event": "done", "id": instruction["id"]}));
    Ok(())
}

/// Instructions until stdin ends. One thread is enough, and what the client itself costs is what is measured.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    emit(json!({"event": "hello", "protocol": 1, "language": "rust"}));
    loop {
        let read = tokio::task::spawn_blocking(|| {
            let mut line = String::new();
            io::stdin().lock().read_line(&mut line).map(|_| line)
        });
        let line = match read.await {
            Ok(Ok(line)) if !line.is_empty() => line,
            _ => return ExitCode::SUCCESS,
        };
        let ran = match serde_json::from_str::<Value>(&line) {
            Ok(instruction) => run(&instruction).await.map_err(|error| error.to_string()),
            Err(error) => Err(format!("the instruction is not JSON: {error}")),
        };
        if let Err(problem) = ran {
            eprintln!("{problem}");
            return ExitCode::FAILURE;
        }
    }
}
