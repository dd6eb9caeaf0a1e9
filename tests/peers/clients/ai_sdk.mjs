// Connects the AI SDK's MCP client to the command in the environment, and prints what it gets. Read from standard input.
import { createMCPClient } from "@ai-sdk/mcp";
import { Experimental_StdioMCPTransport } from "@ai-sdk/mcp/mcp-stdio";

const { PYTHON, PROJECT, TOOL } = process.env;
const transport = new Experimental_StdioMCPTransport({
  command: PYTHON,
  args: ["-m", "toolspace", "mcp"],
  cwd: PROJECT,
});
const client = await createMCPClient({ transport });
const tools = await client.tools();
const result = await tools[TOOL].execute({}, { toolCallId: "1", messages: [] });
console.log(JSON.stringify({ names: Object.keys(tools), result }));
await client.close();
