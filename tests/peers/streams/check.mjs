// Reads streams as the AI SDK and AG-UI themselves do. Standard input: a list of {format, text}; output: what each
// package made of it, or the error that it raised. Run it in the folder where the packages are installed.

import { AbstractAgent, verifyEvents } from "@ag-ui/client";
import { EventSchemas } from "@ag-ui/core/schemas";
import { parseJsonEventStream, readUIMessageStream, safeValidateUIMessages, uiMessageChunkSchema } from "ai";
import { from, lastValueFrom, toArray } from "rxjs";

async function readUi(text) {
  const chunks = [];
  for await (const result of parseJsonEventStream({ stream: new Response(text).body, schema: uiMessageChunkSchema })) {
    if (!result.success) throw result.error;
    chunks.push(result.value);
  }
  let message = null;
  const stream = new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
  let failure = null;
  for await (const state of readUIMessageStream({ stream, onError: (error) => (failure = failure ?? error) })) {
    message = state;
  }
  if (failure) throw failure;
  const checked = message?.parts.length ? await safeValidateUIMessages({ messages: [message] }) : { success: true };
  return { types: chunks.map((chunk) => chunk.type), message, valid: checked.success };
}

class Replay extends AbstractAgent {
  constructor(events) {
    super();
    this.events = events;
  }
  run() {
    return from(this.events);
  }
}

async function readAgUi(text) {
  const events = text
    .split("\n\n")
    .flatMap((block) => block.split("\n").filter((line) => line.startsWith("data: ")))
    .map((line) => EventSchemas.parse(JSON.parse(line.slice(6))));
  await lastValueFrom(from(events).pipe(verifyEvents(false), toArray()));
  let messages = [];
  if (events.length) {
    const agent = new Replay(events);
    await agent.runAgent();
    messages = agent.messages;
  }
  return { types: events.map((event) => event.type), messages };
}

let input = "";
for await (const piece of process.stdin) input += piece;
const answers = [];
for (const { format, text } of JSON.parse(input)) {
  try {
    answers.push(await (format === "ag-ui" ? readAgUi(text) : readUi(text)));
  } catch (error) {
    answers.push({ error: `${error?.name}: ${error?.message}`, cause: String(error?.cause ?? "") });
  }
}
process.stdout.write(JSON.stringify(answers));
