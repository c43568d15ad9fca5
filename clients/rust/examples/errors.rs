//! What an error tells, and whether to try again.

use std::time::Duration;

use dragoman::{Client, Config, Error, GenerateOptions, Reason};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let client = Client::new(Config::default())?;
    let options = GenerateOptions {
        model: Some("no-such-model".to_owned()),
        deadline: Some(Duration::from_secs(30)),
        ..Default::default()
    };
    match client.complete("Hello!", options).await {
        Ok(result) => println!("{}", result.text()),
        Err(error) if error.reason == Reason::QueueFull => println!("busy; again in {:?}", error.retry_delay),
        Err(error) => println!("{} {} {}", error.reason, error.retryable(), error.message),
    }
    Ok(())
}
