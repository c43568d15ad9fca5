package main

import (
	"context"
	"fmt"
	"log"

	"dragoman.dev/clients/go/dragoman"
)

func main() {
	client, err := dragoman.New(dragoman.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	prompt := dragoman.Conversation{{Role: "user", Content: "Hello!"}}
	for token, err := range client.Generate(context.Background(), prompt, dragoman.Options{MaxOutputTokens: new(uint32(32))}).Tokens() {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(token.Text)
	}
}
