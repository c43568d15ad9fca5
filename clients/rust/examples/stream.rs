//! Reads a stream; the README shows it.

use dragoman::{Client, Config, Error, GenerateOptions, Message};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let client = Client::new(Config::default())?;
    let options = GenerateOptions {
        max_output_tokens: Some(32),
        ..Default::default()
    };
    let mut stream = client.generate([Message::user("Hello!")], options);
    while let Some(token) = stream.next().await {
        print!("{}", token?.text);
    }
    Ok(())
}
