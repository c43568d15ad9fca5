//! The Rust client of Dragoman: it asks a controller for a ticket, follows the agent that runs the request, and resumes at the next
//! token elsewhere when that agent dies.
//!
//! ```no_run
//! # async fn example() -> Result<(), dragoman::Error> {
//! let client = dragoman::Client::new(dragoman::Config::default())?;
//! let mut stream = client.generate("Once upon a time", dragoman::GenerateOptions::default());
//! while let Some(token) = stream.next().await {
//!     print!("{}", token?.text);
//! }
//! # Ok(())
//! # }
//! ```

mod attempt;
mod catalogue;
mod channels;
mod client;
mod controllers;
mod directory;
mod embed;
mod errors;
mod follow;
mod progress;
mod request;
mod results;
mod retry;
mod stream;
mod ticket;

/// The messages of the protocol, as `agents`, `hardware` and `load` give them.
pub mod v1 {
    #![allow(missing_docs, clippy::all)]
    tonic::include_proto!("dragoman.v1");
}

pub use catalogue::{Reason, Traits};
pub use client::{Client, Config, DEFAULT_CONTROLLER, DetokenizeOptions, TokenizeOptions};
pub use embed::EmbedOptions;
pub use errors::Error;
pub use request::{Form, GenerateOptions, Message, Priority, Prompt};
pub use results::{
    AgentTimings, Choice, Embeddings, Estimate, FinishReason, GenerationResult, Quote, Timings, Token, TokenLogprob,
    Usage,
};
pub use retry::RetryPolicy;
pub use stream::GenerationStream;
pub use tokio_stream::Stream;
pub use tonic::transport::{Certificate, ClientTlsConfig, Identity};
